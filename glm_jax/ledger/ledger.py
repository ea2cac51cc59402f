"""The ledger of a step: its stages in the order they run, and their sums."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from glm_jax.ledger.attention_stages import Parts, Setting, attention_stages
from glm_jax.ledger.feed_forward_stages import dense_stages, sparse_stages
from glm_jax.ledger.formats import Formats
from glm_jax.ledger.hardware import Hardware
from glm_jax.ledger.layout import Layout
from glm_jax.ledger.shape import StepShape
from glm_jax.ledger.stage import Demand, Floor, Stage
from glm_jax.ledger.step_stages import embedding, head_stages, merge
from glm_jax.ledger.weights import stage_weights
from glm_jax.ledger.work import Method, Work, draft_work, useful_work
from glm_jax.model.config import GlmConfig

# Kinds of layer that stages stand under, in the order of a step.
STEP, LAYER, FULL, DENSE, SPARSE = "step", "layer", "full layer", "dense layer", "sparse layer"
FIRST_PASS, LATER_PASS = "MTP first pass", "MTP later pass"
PARTS = (STEP, LAYER, FULL, DENSE, SPARSE, FIRST_PASS, LATER_PASS)


class Passes(NamedTuple):
    """The work of a step.

    Attributes:
        target: of the model's own layers.
        first: of the MTP layer's pass over the same rows.
        later: of each further pass.
    """

    target: Work
    first: Work
    later: Work


class Sum(NamedTuple):
    """Stages of one kind of layer, or of the step, all layers together."""

    demand: Demand
    floor: Floor
    seconds: float


@dataclass(frozen=True)
class Ledger:
    """All stages of a step on the busiest device.

    Attributes:
        shape: the step.
        setting: model, formats, layout, hardware.
        times: layers of each kind.
        stages: each for one layer, in the order they run.
    """

    shape: StepShape
    setting: Setting
    times: Mapping[str, int]
    stages: tuple[Stage, ...]

    def floor(self, stage: Stage) -> Floor:
        """The least time of a stage in one layer."""
        return stage.floor(self.setting.hardware)

    def find(self, part: str, name: str) -> Stage:
        """The stage of this name.

        Raises:
            KeyError: the step has none.
        """
        for stage in self.stages:
            if (stage.part, stage.name) == (part, name):
                return stage
        raise KeyError(f"the step has no stage {name!r} under {part!r}")

    @cached_property
    def sums(self) -> Mapping[str, Sum]:
        """By kind of layer, all layers of it together."""
        return {
            part: self._sum([stage for stage in self.stages if stage.part == part])
            for part in PARTS
            if self.times.get(part)
        }

    @cached_property
    def total(self) -> Sum:
        """Of the step."""
        return self._sum(self.stages)

    @property
    def seconds(self) -> float:
        """The floor of the step: nothing overlaps between stages."""
        return self.total.seconds

    def _sum(self, stages: "list[Stage] | tuple[Stage, ...]") -> Sum:
        demand, floor, seconds = Demand(), Floor(0.0, 0.0, 0.0), 0.0
        for stage in stages:
            times, own = self.times[stage.part], self.floor(stage)
            demand += stage.demand * times
            floor = Floor(*(a + times * b for a, b in zip(floor, own, strict=True)))
            seconds += times * own.seconds
        return Sum(demand, floor, seconds)


def make_ledger(
    config: GlmConfig,
    shape: StepShape,
    *,
    formats: Formats,
    hardware: Hardware,
    layout: Layout | None = None,
    method: Method | None = None,
    passes: Passes | None = None,
) -> Ledger:
    """Work out every stage of a step.

    Args:
        config: the model.
        shape: the step.
        formats: of weights, rows and cache.
        hardware: of each device.
        layout: of the devices; None is one.
        method: of the indexer.
        passes: the work where it is not the least (``padding.program_passes``).

    Raises:
        ValueError: the step drafts, but the model has no MTP layer; or its experts do not spread
            evenly.
    """
    layout, method = layout or Layout(), method or Method()
    if shape.new_drafts and not config.num_nextn_predict_layers:
        raise ValueError(
            f"new_drafts is {shape.new_drafts}, but the model has no MTP layer to draft with. "
            "Take 0."
        )
    if config.n_routed_experts % layout.ep:
        raise ValueError(
            f"ep is {layout.ep}, which does not divide the {config.n_routed_experts} routed "
            "experts. Take a divisor."
        )
    setting = Setting(config, stage_weights(config), formats, layout, hardware, method)
    if passes is None:
        target = useful_work(config, shape, layout, method)
        indexed = not config.index_share_for_mtp_iteration
        later = draft_work(config, shape, layout, indexed=indexed)
        passes = Passes(target, target._replace(sampled=later.sampled), later)
    stages = tuple(_stages(setting, shape, passes))
    return Ledger(shape, setting, _times(config, shape), stages)


def _times(config: GlmConfig, shape: StepShape) -> dict[str, int]:
    sparse = config.mlp_layer_types.count("sparse")
    return {
        STEP: 1,
        LAYER: config.num_hidden_layers,
        FULL: config.indexer_types.count("full"),
        DENSE: config.num_hidden_layers - sparse,
        SPARSE: sparse,
        FIRST_PASS: min(1, shape.new_drafts),
        LATER_PASS: max(0, shape.new_drafts - 1),
    }


def _stages(setting: Setting, shape: StepShape, passes: Passes) -> Iterator[Stage]:
    config, work = setting.config, passes.target
    sparse = config.mlp_layer_types.count("sparse")
    yield embedding(setting, work, STEP)
    parts = Parts(LAYER, FULL)
    yield from attention_stages(setting, work, parts, writes=True, indexed=True)
    if sparse < config.num_hidden_layers:
        yield from dense_stages(setting, work, DENSE)
    if sparse:
        yield from sparse_stages(setting, work, SPARSE)
    yield from head_stages(setting, work, STEP)
    if shape.new_drafts:
        yield from _draft_stages(setting, passes.first, FIRST_PASS, indexed=True)
    if shape.new_drafts > 1:
        indexed = not config.index_share_for_mtp_iteration
        yield from _draft_stages(setting, passes.later, LATER_PASS, indexed=indexed)


def _draft_stages(setting: Setting, work: Work, part: str, *, indexed: bool) -> Iterator[Stage]:
    """One pass of the MTP layer; one without an indexer of its own writes nothing."""
    yield embedding(setting, work, part)
    yield merge(setting, work, part)
    parts = Parts(part, part)
    yield from attention_stages(setting, work, parts, writes=indexed, indexed=indexed)
    yield from sparse_stages(setting, work, part)
    yield from head_stages(setting, work, part)
