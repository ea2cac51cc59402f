"""The accounts as a picture: what each step's floor is made of, and what bounds its stages."""

from pathlib import Path

from glm_jax.ledger.accounts import Accounts
from glm_jax.ledger.ledger import PARTS

_COLOURS = ("#999999", "#4477aa", "#66ccee", "#ccbb44", "#228833", "#ee6677", "#aa3377")
_BOUNDS = {"memory": "#4477aa", "compute": "#ee6677", "link": "#ccbb44", "": "#999999"}
_SHOWN = 16  # stages, the longest


def draw(accounts: Accounts, path: Path) -> None:
    """Draw both into one picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # An optional dependency.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=(1, 2.4))
    kinds = list(accounts.ledgers)
    left = dict.fromkeys(kinds, 0.0)
    for part, colour in zip(PARTS, _COLOURS, strict=True):
        sums = {kind: accounts.ledgers[kind].sums.get(part) for kind in kinds}
        widths = [0.0 if one is None else 1e3 * one.seconds for one in sums.values()]
        if any(widths):
            above.barh(kinds, widths, left=list(left.values()), color=colour, label=part)
        left = {kind: left[kind] + width for kind, width in zip(kinds, widths, strict=True)}
    for kind, total in left.items():
        above.text(total, kind, f" {total:.1f}", va="center", fontsize=9)
    above.invert_yaxis()
    above.set_xlabel("least ms of a step, busiest device")
    above.set_xlim(0, 1.1 * max(left.values()))
    above.legend(fontsize=8, ncols=len(PARTS), loc="upper center", bbox_to_anchor=(0.5, -0.32))
    step = accounts.step
    above.set_title(
        f"{step.shape.prefill_rows} prefill and {step.shape.decode_rows} decode rows, "
        f"{step.setting.layout}, {step.setting.hardware.name}",
        fontsize=10,
    )
    stages = [(step.times[one.part] * step.floor(one).seconds, one) for one in step.stages]
    longest = sorted(stages, key=lambda pair: pair[0], reverse=True)[:_SHOWN]
    names = [f"{stage.name} ({step.times[stage.part]} x {stage.part})" for _, stage in longest]
    bounds = [step.floor(stage).bound for _, stage in longest]
    values = [1e3 * seconds for seconds, _ in longest]
    below.barh(names, values, color=[_BOUNDS[bound] for bound in bounds])
    below.invert_yaxis()
    below.tick_params(axis="y", labelsize=8)
    below.set_xlabel(f"least ms in the {step.shape.kind} step, by what bounds it")
    patches = [Patch(color=_BOUNDS[name], label=name) for name in dict.fromkeys(bounds)]
    below.legend(handles=patches, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=120)
