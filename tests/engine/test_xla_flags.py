"""Compiler options of the step programs, by platform."""

from glm_jax.engine.config import EngineConfig
from glm_jax.engine.xla_flags import GPU_FLAGS, platform_flags, xla_options
from glm_jax.engine_options import resolve_options
from glm_jax.model.presets import PRESETS

TINY = PRESETS["tiny-random"]


def test_platform_flags_are_those_of_the_gpu_or_none():
    assert platform_flags("gpu") == platform_flags("cuda") == GPU_FLAGS
    assert platform_flags("cpu") == ()


def test_xla_options_split_at_the_first_sign():
    assert xla_options(("a=1,2", "b=c=d")) == {"a": "1,2", "b": "c=d"}
    assert xla_options(()) is None


def test_a_config_takes_the_flags_of_the_platform_unless_some_are_given():
    assert resolve_options(TINY, {}, "gpu").engine.xla_flags == GPU_FLAGS
    assert resolve_options(TINY, {}, "cpu").engine.xla_flags == ()
    own = resolve_options(TINY, {"xla_flags": ["a=1"]}, "gpu").engine
    assert own == EngineConfig(**{**vars(own), "xla_flags": ("a=1",)})
