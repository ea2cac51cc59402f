"""The stages of a layer's feed-forward: dense, or router, exchange, routed and shared experts."""

from collections.abc import Iterator

from glm_jax.ledger.attention_stages import Setting
from glm_jax.ledger.formats import weight_bytes
from glm_jax.ledger.stage import Demand, Stage
from glm_jax.ledger.work import Work


def dense_stages(setting: Setting, work: Work, part: str) -> Iterator[Stage]:
    """A SwiGLU split over all devices: every device computes a part of every row."""
    config = setting.config
    width = config.intermediate_size
    if setting.layout.tp > 1:
        yield _gather(setting, work, part)
    yield _split_mlp(setting, work, part, "dense MLP", (setting.weights.dense, width))
    if setting.layout.tp > 1:
        yield _scatter(setting, work, part)


def sparse_stages(setting: Setting, work: Work, part: str) -> Iterator[Stage]:
    """Router, rows to the experts, routed experts, shared expert, rows back."""
    config, layout = setting.config, setting.layout
    yield _router(setting, work, part)
    if layout.sends_copies:
        yield _copies(setting, work, part, back=False)
    elif layout.tp > 1:
        yield _gather(setting, work, part)
    yield _experts(setting, work, part)
    width = config.n_shared_experts * config.moe_intermediate_size
    yield _split_mlp(setting, work, part, "shared expert", (setting.weights.shared, width))
    if layout.sends_copies:
        yield _copies(setting, work, part, back=True)
    elif layout.tp > 1:
        yield _scatter(setting, work, part)


def _split_mlp(
    setting: Setting, work: Work, part: str, name: str, sizes: tuple[float | int, float | int]
) -> Stage:
    """An MLP of so many elements and of this inner width, split over all devices."""
    elements, width = (size / setting.layout.tp for size in sizes)
    formats, rows = setting.formats, work.all_rows
    demand = Demand(
        operations=2 * elements * rows,
        elementwise=5 * width * rows,
        read=elements * weight_bytes(formats.matrices),
        cached=formats.row_bytes * rows * (2 * setting.config.hidden_size + 3 * width),
    )
    formula = f"2 x {elements:,.0f} weights x rows of all devices; weights read once"
    return Stage(part, name, formats.matrices, rows, "rows", formula, shared=demand)


def _router(setting: Setting, work: Work, part: str) -> Stage:
    config, formats = setting.config, setting.formats
    elements = setting.weights.router
    values = config.hidden_size + config.n_routed_experts
    demand = Demand(
        operations=2 * config.hidden_size * config.n_routed_experts * work.rows,
        elementwise=(4 * config.hidden_size + 6 * config.n_routed_experts) * work.rows,
        read=elements * weight_bytes(formats.router),
        cached=4 * values * work.rows,
    )
    return Stage(
        part,
        "router",
        formats.router,
        work.rows,
        "rows",
        "2 x D x E x rows, in float32: it decides",
        shared=demand,
    )


def _experts(setting: Setting, work: Work, part: str) -> Stage:
    config, layout, formats = setting.config, setting.layout, setting.formats
    elements, width = setting.weights.expert, config.moe_intermediate_size
    on_device = work.assignments / layout.tp
    demand = Demand(
        operations=2 * elements * on_device,
        elementwise=(5 * width + 2 * config.hidden_size) * on_device,
        read=work.hit / layout.tp * elements * weight_bytes(formats.matrices),
        cached=formats.row_bytes * on_device * (2 * config.hidden_size + 3 * width),
    )
    return Stage(
        part,
        "routed experts",
        formats.matrices,
        on_device,
        "rows",
        f"2 x {elements:,.0f} weights x N X / devices; experts hit: E (1 - (1 - X/E)^N) / devices "
        f"= {work.hit / layout.tp:.1f}",
        shared=demand,
    )


def _copies(setting: Setting, work: Work, part: str, *, back: bool) -> Stage:
    """One copy of a row for every other device that holds an expert of its choice."""
    config, layout, formats = setting.config, setting.layout, setting.formats
    reached = layout.devices_of_row(config.n_routed_experts, config.num_experts_per_tok)
    copies = reached * (layout.ep - 1) / layout.ep
    value = formats.row_bytes if back else formats.sent_bytes
    return Stage(
        part,
        "combine" if back else "dispatch",
        "float32",
        work.useful * copies,
        "copies",
        f"{value:.4g} bytes x D x {copies:.2f} copies x useful rows",
        shared=Demand(sent=work.useful * copies * value * config.hidden_size),
        exchanges=1,
    )


def _gather(setting: Setting, work: Work, part: str) -> Stage:
    """Every device gets the rows of all attention ranks."""
    ranks, formats = setting.layout.dp, setting.formats
    size = formats.sent_bytes * setting.config.hidden_size * work.all_rows
    return Stage(
        part,
        "gather rows",
        "float32",
        work.all_rows,
        "rows",
        f"{formats.sent_bytes:.4g} bytes x D x rows x {ranks - 1}/{ranks}",
        shared=Demand(sent=size * (ranks - 1) / ranks),
        exchanges=1 if ranks > 1 else 0,
    )


def _scatter(setting: Setting, work: Work, part: str) -> Stage:
    """Every device's part of each row is summed where the row lives."""
    layout, formats = setting.layout, setting.formats
    size = formats.row_bytes * setting.config.hidden_size * work.all_rows
    sent = size * (layout.tp - 1) / layout.tp
    share = layout.attention_tp
    # The devices of an attention rank all need its rows again.
    sent += size / layout.dp * (share - 1) / share
    return Stage(
        part,
        "scatter sums",
        "float32",
        work.all_rows,
        "rows",
        f"{formats.row_bytes:.4g} bytes x D x rows x {layout.tp - 1}/{layout.tp}",
        shared=Demand(sent=sent),
        exchanges=1 if share == 1 else 2,
    )
