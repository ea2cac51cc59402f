"""The published account of a mixed step, recomputed, and what it has wrong.

An article on GLM-5.3 (a prompt of 8192 tokens joins 32 requests with 5 drafts each at 131,072
tokens, on tp8ep8dp8) counts bytes and operations of the whole node. The items are its items and
those that it lacks, by its own way of counting: one copy of a row for each of its experts, no
scales, the MTP layer left out. The stages of the ledger count one device, and copies by devices.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from glm_jax.ledger.formats import Formats
from glm_jax.ledger.layout import Layout
from glm_jax.ledger.shape import StepShape
from glm_jax.model.config import GlmConfig


class Basis(NamedTuple):
    """What an item is computed from."""

    config: GlmConfig
    formats: Formats
    layout: Layout
    shape: StepShape

    @property
    def sparse(self) -> int:
        """Layers with experts."""
        return self.config.mlp_layer_types.count("sparse")

    @property
    def full(self) -> int:
        """Layers with an indexer."""
        return self.config.indexer_types.count("full")

    @property
    def attended(self) -> int:
        """Pairs of a row and a key that it attends to, at most K a row."""
        rows = (*self.shape.chunks, *self.shape.groups)
        return sum(one.pairs_within(self.config.index_topk) for one in rows)

    @property
    def scored(self) -> int:
        """Pairs that an indexer scores."""
        return sum(one.pairs for one in (*self.shape.chunks, *self.shape.groups))

    @property
    def remote_copies(self) -> float:
        """Of a row, to other devices, one each."""
        config, layout = self.config, self.layout
        reached = layout.devices_of_row(config.n_routed_experts, config.num_experts_per_tok)
        return reached * (layout.ep - 1) / layout.ep


class Item(NamedTuple):
    """One line of the account, of all devices together.

    Attributes:
        name: what it is.
        formula: in the letters of the design.
        unit: "bytes", "pairs", "operations" or "rows".
        values: by kind of step.
        published: what the article says; "" where it says nothing.
        note: why that is wrong; "" where it is right.
    """

    name: str
    formula: str
    unit: str
    values: Mapping[str, float]
    published: str
    note: str

    @property
    def ratio(self) -> float | None:
        """Mixed over decode; None where there are not both."""
        if "mixed" not in self.values or not self.values["decode"]:
            return None
        return self.values["mixed"] / self.values["decode"]


class _Line(NamedTuple):
    name: str
    formula: str
    unit: str
    value: Callable[[Basis], float]
    published: str = ""
    note: str = ""


def article_items(
    config: GlmConfig, formats: Formats, layout: Layout, shapes: Mapping[str, StepShape]
) -> list[Item]:
    """Every item for each kind of step.

    Args:
        config: the model.
        formats: of the cache; rows travel as e4m3 to the experts and as bfloat16 back.
        layout: of the devices.
        shapes: by kind.
    """
    bases = {kind: Basis(config, formats, layout, shape) for kind, shape in shapes.items()}
    return [
        Item(
            line.name,
            line.formula,
            line.unit,
            {kind: line.value(basis) for kind, basis in bases.items()},
            line.published,
            line.note,
        )
        for line in _LINES
    ]


def _rows(
    width: float | int, layers: Callable[[Basis], int] = lambda _: 1
) -> Callable[[Basis], float]:
    """So many bytes a value of a row, in each of the layers."""
    return lambda b: b.shape.rows * b.config.hidden_size * width * layers(b)


def _copies(
    width: float | int, layers: Callable[[Basis], int] = lambda _: 1
) -> Callable[[Basis], float]:
    """The same for each of a row's experts."""
    return lambda b: _rows(width, layers)(b) * b.config.num_experts_per_tok


def _sparse(basis: Basis) -> int:
    return basis.sparse


_LINES: Sequence[_Line] = (
    _Line("hidden gather, one layer", "N D 2", "bytes", _rows(2), "2.36 MB / 103 MB"),
    _Line(
        "hidden gather, all sparse layers",
        "N D 2 x layers",
        "bytes",
        _rows(2, _sparse),
        "counted besides the dispatch",
        "a layer gathers its rows or sends them to the experts; nobody pays for both",
    ),
    _Line("dispatch, one layer", "N X D", "bytes", _copies(1), "9.44 MB / 412 MB"),
    _Line("combine, one layer", "N X D 2", "bytes", _copies(2), "18.9 MB / 824 MB"),
    _Line(
        "dispatch and combine, all sparse layers",
        "N X D 3 x layers",
        "bytes",
        _copies(3, _sparse),
        "28 MB / 92.7 GB, 3300 times",
        "28 MB is one layer of decode beside all layers of the mixed step; like with like it is "
        "2.12 GB, and the ratio is that of the rows, 43.7",
    ),
    _Line(
        "the same, one copy a device, to others only",
        "N D 3 x layers x copies",
        "bytes",
        lambda b: _rows(3, _sparse)(b) * b.remote_copies,
        "",
        "eight experts sit on 5.3 of 8 devices, one of them the row's own: 4.6 copies travel, not "
        "8. And the sum over all devices never goes through one network card: 92 GB at 50 GB/s is "
        "not 1.8 s",
    ),
    _Line(
        "scales of the dispatch, one layer",
        "N X D / 128 x 4",
        "bytes",
        _copies(4 / 128),
        "",
        "three percent of the dispatch",
    ),
    _Line(
        "attended pairs, one layer",
        "sum of min(position + 1, K)",
        "pairs",
        lambda b: b.attended,
        "prefix + P^2 / 2 = 33.6 million for the prompt",
        "a row attends to at most 2048 keys whatever its prefix: 14.68 million pairs; the square "
        "is the indexer's alone",
    ),
    _Line(
        "gathered entries, one layer",
        "pairs x bytes of an entry",
        "bytes",
        lambda b: b.attended * b.formats.latent_bytes(b.config),
        "258 MB / one more reading",
        "the prompt's rows gather 9.6 GB of 5.4 MB of distinct entries: reuse is the matter, not "
        "the square",
    ),
    _Line(
        "attention, one layer",
        "pairs x H x 2 (2 C + B)",
        "operations",
        lambda b: (
            2.0
            * b.attended
            * b.config.num_attention_heads
            * (2 * b.config.kv_lora_rank + b.config.qk_rope_head_dim)
        ),
    ),
    _Line(
        "scored pairs, one full layer",
        "D S + P prefix + P (P + 1) / 2",
        "pairs",
        lambda b: b.scored,
        "about twice",
    ),
    _Line(
        "index scores, all full layers",
        "pairs x 2 M I x layers",
        "operations",
        lambda b: 2.0 * b.scored * b.config.index_n_heads * b.config.index_head_dim * b.full,
    ),
    _Line(
        "index keys read, one full layer",
        "sum over requests of S x bytes of a key",
        "bytes",
        lambda b: (
            b.formats.index_bytes(b.config)
            * (
                sum(group.context for group in b.shape.groups)
                + sum(chunk.prefix + chunk.rows for chunk in b.shape.chunks)
            )
        ),
        "",
        "a request's rows share one reading; row by row it would be six times as much",
    ),
    _Line(
        "cache written",
        "N x bytes of a token",
        "bytes",
        lambda b: b.shape.rows * b.formats.token_bytes(b.config, mtp=False),
    ),
    _Line(
        "sampled rows",
        "sum over requests of drafts + 1",
        "rows",
        lambda b: b.shape.sampled_rows,
        "one per request",
        "every verify row needs logits; of a prompt only the last chunk draws",
    ),
)

NOTES: Sequence[str] = (
    "The MTP layer drafts, it does not verify: the target's layers verify, and those are the 192 "
    "rows. Its first pass runs over all rows, prefill rows too, or its own cache would have holes.",
    "A decode row's head is 192 + 64 wide for a score and 576 in the latent space, not 192.",
    "Twice the scored pairs of decode holds for a prompt's first chunk. P x prefix is missing, and "
    "rules all later ones: at a prefix of 128K it is 45 times.",
    "A chunk of 8192 rows lives on one attention rank unless its rows are split: the floor of the "
    "mixed step is then more than 5 times that of split rows, and decodes wait almost 20 times as "
    "long as alone.",
    "32 requests of 131,072 tokens take 134 of the 141 GB of each of 8 H200 before any activation.",
    "An engine that gives up the drafts in a mixed step has 8224 rows, not 8384.",
)
