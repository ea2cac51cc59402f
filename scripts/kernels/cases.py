"""The calls that matter: of GLM-5.3 on a GPU, of the embedded model on a CPU."""

from glm_jax.model.rows import TILE_ROWS, WIDE_TILE_ROWS
from scripts.kernels.expert_matmul import ExpertMatmul
from scripts.kernels.index_topk import IndexTopk
from scripts.kernels.problem import Problem
from scripts.kernels.sparse_mla import Heads, SparseMla

OPERATORS = ("index_topk", "sparse_mla", "expert_matmul")
# Of a pool on a GPU: beyond what 32-bit arithmetic on bytes can reach, within 20 GB in float32.
_PLANES = 8
# Two of GLM-5.3's layers of experts are 39 GB.
_LAYERS = 2
_GLM = Heads(64, nope=192, value=256)
_EMBEDDED = Heads(8, nope=32, value=32)


def problems_of(platform: str) -> list[Problem]:
    """The calls for JAX's platform of that name.

    Raises:
        ValueError: there are none.
    """
    if platform not in _PROBLEMS:
        raise ValueError(
            f"there are no kernel cases for a {platform}; allowed: {', '.join(_PROBLEMS)}."
        )
    return [*_PROBLEMS[platform]]


def _index(segment: str, rows: tuple[int, int], pages: int, keys: str) -> IndexTopk:
    """Of GLM-5.3: 32 index heads, top 2048; ``rows`` are requests and rows of each."""
    return IndexTopk(segment, *rows, 32, pages, 2048, keys, _PLANES)


def _attend(segment: str, rows: tuple[int, int], entry: str) -> SparseMla:
    """Of GLM-5.3: top 2048 of 32768 positions."""
    return SparseMla(segment, *rows, _GLM, 512, 2048, entry, "bfloat16", _PLANES)


def _small_index(segment: str, rows: tuple[int, int], keys: str) -> IndexTopk:
    """Of the embedded model: 16 index heads, top 256, 2048 positions."""
    return IndexTopk(segment, *rows, 16, 32, 256, keys, 4, _tile_rows(keys))


def _small_attend(segment: str, rows: tuple[int, int], entry: str) -> SparseMla:
    """Of the embedded model."""
    weights = "float32" if entry == "float32" else "bfloat16"
    return SparseMla(segment, *rows, _EMBEDDED, 32, 256, entry, weights, 4, _tile_rows(entry))


def _tile_rows(storage_format: str) -> int:
    """Of the embedded model, which is float32 on a CPU."""
    return WIDE_TILE_ROWS if storage_format == "float32" else TILE_ROWS


_PROBLEMS: dict[str, tuple[Problem, ...]] = {
    # 32 requests that verify five drafts each, and one alone; prompts of 1024 rows, and of 8192
    # against 128K keys; the embedded model.
    "gpu": (
        *(_index("decode", (32, 6), 512, keys) for keys in ("bfloat16", "fp8_planar", "float32")),
        _index("decode", (1, 1), 2048, "fp8_planar"),
        _index("prefill", (1, 1024), 512, "bfloat16"),
        _index("prefill", (1, 8192), 2048, "bfloat16"),
        _small_index("decode", (8, 1), "bfloat16"),
        _small_index("decode", (8, 6), "bfloat16"),
        *(_attend("decode", (32, 6), entry) for entry in ("bfloat16", "fp8_ds_mla", "float32")),
        _attend("decode", (1, 6), "bfloat16"),
        _attend("prefill", (1, 1024), "bfloat16"),
        _small_attend("decode", (8, 1), "bfloat16"),
        *(
            ExpertMatmul(rows, 256, 8, 6144, 2048, weights, _LAYERS)
            for weights in ("bfloat16", "fp8")
            for rows in (192, 704)
        ),
        ExpertMatmul(192, 8, 2, 192, 128, "bfloat16", 5),
    ),
    # Decoding requests, and a chunk of a prompt.
    "cpu": (
        _small_index("decode", (8, 1), "float32"),
        _small_index("decode", (8, 6), "float32"),
        _small_index("prefill", (1, 256), "float32"),
        _small_attend("decode", (8, 1), "float32"),
        _small_attend("decode", (8, 6), "float32"),
        _small_attend("prefill", (1, 256), "float32"),
        ExpertMatmul(8, 8, 2, 192, 128, "float32", 5),
        ExpertMatmul(256, 8, 2, 192, 128, "float32", 5),
    ),
}
