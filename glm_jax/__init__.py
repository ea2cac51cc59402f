"""Inference engine for the GLM-5 family in JAX: the public names, each imported at first use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm_jax.engine.config import EngineConfig
    from glm_jax.engine.engine import Engine
    from glm_jax.engine.logprob import Logprob
    from glm_jax.llm import LLM
    from glm_jax.model.config import GlmConfig
    from glm_jax.sampling.params import SamplingParams
    from glm_jax.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = ["LLM", "Engine", "EngineConfig", "GlmConfig", "Logprob", "SamplingParams", "Tokenizer"]

# Resolved lazily (PEP 562): `import glm_jax` must not import JAX, which costs half a second and
# would make the host-only modules (scheduler, pages, grid, ...) unusable without an accelerator.
_HOMES = {
    "Engine": "glm_jax.engine.engine",
    "EngineConfig": "glm_jax.engine.config",
    "GlmConfig": "glm_jax.model.config",
    "LLM": "glm_jax.llm",
    "Logprob": "glm_jax.engine.logprob",
    "SamplingParams": "glm_jax.sampling.params",
    "Tokenizer": "glm_jax.tokenizer",
}


def __getattr__(name: str) -> Any:
    """Import the public name's module and keep the name for the next access."""
    if name not in _HOMES:
        raise AttributeError(f"module 'glm_jax' has no attribute {name!r}; it has {__all__}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, whether resolved yet or not."""
    return sorted({*globals(), *__all__})
