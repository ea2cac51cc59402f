"""The stages around the layers: embedding, head, sampling, and what an MTP pass adds."""

from collections.abc import Iterator

from glm_jax.ledger.attention_stages import Setting
from glm_jax.ledger.formats import weight_bytes
from glm_jax.ledger.stage import Demand, Stage
from glm_jax.ledger.work import Work

_LOGIT_BYTES = 4


def embedding(setting: Setting, work: Work, part: str) -> Stage:
    """One line of the table a row; the table is split over all devices."""
    formats, devices = setting.formats, setting.layout.tp
    value = weight_bytes(formats.narrow)
    lines = setting.config.hidden_size * work.rows
    return Stage(
        part,
        "embedding",
        "float32",
        work.rows,
        "rows",
        f"{value:.4g} bytes x D x rows",
        shared=Demand(
            read=value * lines,
            cached=formats.row_bytes * lines,
            sent=value * lines * (devices - 1) / devices,
        ),
        exchanges=1 if devices > 1 else 0,
    )


def head_stages(setting: Setting, work: Work, part: str) -> Iterator[Stage]:
    """Logits of the rows that are drawn at, and the draw; the vocabulary is split."""
    config, formats, devices = setting.config, setting.formats, setting.layout.tp
    elements, rows = setting.weights.head / devices, work.sampled
    logits = _LOGIT_BYTES * config.vocab_size / devices * rows
    yield Stage(
        part,
        "head",
        formats.narrow,
        rows,
        "rows",
        f"2 x {elements:,.0f} weights x rows; weights read once",
        shared=Demand(
            operations=2 * elements * rows,
            read=elements * weight_bytes(formats.narrow),
            cached=logits + formats.row_bytes * config.hidden_size * rows,
        ),
        exchanges=1 if devices > 1 else 0,
    )
    yield Stage(
        part,
        "sampling",
        "float32",
        rows,
        "rows",
        "one read of the float32 logits",
        shared=Demand(elementwise=3 * config.vocab_size / devices * rows, cached=logits),
    )


def merge(setting: Setting, work: Work, part: str) -> Stage:
    """The MTP layer's input: hidden row and embedding of the next token, joined."""
    formats, width = setting.formats, setting.config.hidden_size
    elements = setting.weights.merge
    return Stage(
        part,
        "merge",
        formats.narrow,
        work.rows,
        "rows",
        f"2 x {elements:,.0f} weights x rows; weights read once",
        shared=Demand(
            operations=2 * elements * work.rows,
            elementwise=8 * width * work.rows,
            read=elements * weight_bytes(formats.narrow),
            cached=3 * width * formats.row_bytes * work.rows,
        ),
    )
