"""What a plan is asked for: a model, GPUs, a load and the types of weights and cache; host-only."""

from dataclasses import dataclass

from bucketing.cell import Cell
from glm_jax.model.config import GlmConfig
from glm_jax.model.parameters import fp8_obstacle

PAGE_SIZE = 64
CHOICES = {
    "weight_dtype": ("fp8", "bfloat16", "float32"),
    "kv_cache_dtype": ("fp8_ds_mla", "bfloat16", "float32"),
}
_SMALLEST = {"gpus": 1, "context": 2, "seqs": 1, "drafts": 0, "prefill": 1}


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One model on several H200 of a node, and the load that it is to bear.

    Requests are spread over the GPUs (data-parallel attention), and so are the routed experts and
    the rows of a prompt's chunk.

    Attributes:
        config: The model.
        gpus: GPUs; they must divide the routed experts evenly.
        context: Tokens of each request, prompt and output together.
        seqs: Requests that run at once, on all GPUs together.
        drafts: Draft tokens of a request in a step.
        prefill: Prefill rows of a mixed step, on all GPUs together.
        weight_dtype: "fp8" is block FP8 for the matrices (see `weight_bytes`).
        kv_cache_dtype: "fp8_ds_mla" means planar FP8 pages for the index keys too.
    """

    config: GlmConfig
    gpus: int = 8
    context: int = 131072
    seqs: int = 32
    drafts: int = 5
    prefill: int = 8192
    weight_dtype: str = "fp8"
    kv_cache_dtype: str = "fp8_ds_mla"

    def __post_init__(self) -> None:
        """Refuse what cannot be planned.

        Raises:
            ValueError: it names the option, its value and what is allowed.
        """
        for name, low in _SMALLEST.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: {low} or more.")
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}."
                )
        self._check_model()

    def _check_model(self) -> None:
        """Refuse what does not go with the model."""
        obstacle = fp8_obstacle(self.config) if self.weight_dtype == "fp8" else None
        if obstacle is not None:
            raise ValueError(obstacle)
        if self.config.n_routed_experts % self.gpus:
            raise ValueError(
                f"gpus is {self.gpus}, which does not divide the {self.config.n_routed_experts} "
                "routed experts of a layer. Take a divisor."
            )
        limit = self.config.max_position_embeddings
        if self.context > limit:
            raise ValueError(
                f"context is {self.context}, but the model's positions end at {limit} "
                "(max_position_embeddings). Lower context."
            )
        if self.drafts and not self.config.num_nextn_predict_layers:
            raise ValueError(
                f"drafts is {self.drafts}, but the model has no MTP layer to draft with. Take 0."
            )

    @property
    def seqs_per_gpu(self) -> int:
        """Requests on the busiest GPU."""
        return -(-self.seqs // self.gpus)

    @property
    def pages_per_seq(self) -> int:
        """Pages of one request."""
        return -(-self.context // PAGE_SIZE)

    def steps(self) -> dict[str, Cell]:
        """The steps of a loaded node as cells of all GPUs, every GPU as busy as the busiest."""
        groups, width = self.seqs_per_gpu * self.gpus, 1 + self.drafts
        return {"decode": Cell(0, groups, width), "mixed": Cell(self.prefill, groups, width)}

    def steps_of_rank(self) -> dict[str, Cell]:
        """The part of each step that one GPU computes."""
        gpus = self.gpus
        return {
            name: Cell(-(-cell.prefill // gpus), cell.groups // gpus, cell.width)
            for name, cell in self.steps().items()
        }
