"""What every decoder layer has: two norms and attention. Indexer and feed-forward vary by layer."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from glm_jax.model.attention import Attention


class Block(nnx.Module):
    """Norms and attention of one layer."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        """Wrap arrays, or shapes of arrays, by their names."""
        prefix = "attention."
        own = {name[len(prefix) :]: a for name, a in arrays.items() if name.startswith(prefix)}
        self.input_norm = nnx.Param(arrays["input_norm"])  # [D]
        self.post_norm = nnx.Param(arrays["post_norm"])  # [D]
        self.attention = Attention(own)
