"""The accounts as plain values: one object for JSON, one line a stage for CSV."""

import csv
import io
import math
from typing import Any

from glm_jax.ledger.accounts import Accounts
from glm_jax.ledger.article import NOTES, article_items
from glm_jax.ledger.ledger import Ledger, Sum
from glm_jax.ledger.stage import Stage
from glm_jax.ledger.weights import model_size, tensor_counts


def as_json(accounts: Accounts) -> dict[str, Any]:
    """Everything: operations, bytes of the busiest device, seconds."""
    setting, shape = accounts.step.setting, accounts.step.shape
    config, formats = setting.config, setting.formats
    shapes = {kind: ledger.shape for kind, ledger in accounts.ledgers.items()}
    items = article_items(config, formats, setting.layout, shapes)
    return {
        "model": model_size(config)._asdict() | {"tensors": tensor_counts(config)._asdict()},
        "step": {
            "chunks": [chunk._asdict() for chunk in shape.chunks],
            "groups": [group._asdict() for group in shape.groups],
            "cell": None if shape.cell is None else list(shape.cell),
            "new_drafts": shape.new_drafts,
        },
        "layout": {
            "name": str(setting.layout),
            "split_chunks": setting.layout.split_chunks,
            "exchange": setting.layout.exchange,
        },
        "hardware": {name: _finite(value) for name, value in setting.hardware._asdict().items()},
        "formats": formats._asdict(),
        "cache_bytes": {
            "latent": formats.latent_bytes(config),
            "index_key": formats.index_bytes(config),
            "token": formats.token_bytes(config, mtp=False),
            "token_with_mtp": formats.token_bytes(config, mtp=True),
        },
        "accounts": {kind: _account(ledger) for kind, ledger in accounts.ledgers.items()},
        "mixed_over_both_alone": accounts.together,
        "mixed_over_decode": accounts.stretch,
        "who_pays": [bill._asdict() for bill in accounts.bills()],
        "published": [item._asdict() | {"ratio": item.ratio} for item in items],
        "notes": list(NOTES),
    }


def _account(ledger: Ledger) -> dict[str, Any]:
    return {
        "rows": ledger.shape.rows,
        "stages": [stage_values(ledger, stage) for stage in ledger.stages],
        "sums": {part: _sum(one) for part, one in ledger.sums.items()},
        "total": _sum(ledger.total),
    }


def _sum(one: Sum) -> dict[str, Any]:
    return one.demand._asdict() | {"floor": one.floor._asdict(), "seconds": one.seconds}


def stage_values(ledger: Ledger, stage: Stage) -> dict[str, Any]:
    """One stage of one layer, flat."""
    floor = ledger.floor(stage)
    return {
        "part": stage.part,
        "layers": ledger.times[stage.part],
        "stage": stage.name,
        "who": stage.mark,
        "precision": stage.precision,
        "count": stage.count,
        "unit": stage.unit,
        **stage.demand._asdict(),
        "memory_seconds": floor.memory,
        "compute_seconds": floor.compute,
        "link_seconds": floor.link,
        "floor_seconds": floor.seconds,
        "bound": floor.bound,
        "formula": stage.formula,
    }


def as_csv(accounts: Accounts) -> str:
    """Every stage of every account, one layer each, below a line of names."""
    rows = [
        {"account": kind} | stage_values(ledger, stage)
        for kind, ledger in accounts.ledgers.items()
        for stage in ledger.stages
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _finite(value: Any) -> Any:
    """JSON has no infinity: a device alone has no link."""
    return None if isinstance(value, float) and math.isinf(value) else value
