"""The plan of a deployment: what each GPU holds, what fits beside it, how long a step must take.

The program's memory comes from the compiler (``program_peak``) or from the user.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from bucketing.cell import Cell
from glm_jax.deployment.deployment import PAGE_SIZE, Deployment
from glm_jax.deployment.weight_bytes import REST, ROUTED, WeightPart, weight_parts
from glm_jax.model.cache import cache_format_of, entry_bytes
from glm_jax.simulate.step_time import H200StepTime, Hardware

# Of one H200, by the data sheet. The device offers nearly 141 GiB, as the compiler is told
# (``h200.txtpb``); what is over is left to CUDA's context and the buffers of collectives.
GPU_BYTES = 141 * 10**9


class ProgramNeed(NamedTuple):
    """The memory of the step programs.

    Attributes:
        temporaries: bytes of scratch memory and of results, by step; only one runs at a time.
        source: where the figures are from, or why there are none.
    """

    temporaries: Mapping[str, int]
    source: str

    @property
    def peak(self) -> int:
        """Bytes of the hungriest step; 0 where none is known."""
        return max(self.temporaries.values(), default=0)


class Floor(NamedTuple):
    """The least time of a step, in seconds.

    Attributes:
        memory: bytes / bandwidth, were that all.
        compute: operations / peak rate, were that all.
        link: exchange between the GPUs, were that all.
        total: the greater of memory and compute of each operator, and the exchange, added.
    """

    memory: float
    compute: float
    link: float
    total: float


class Plan(NamedTuple):
    """All figures of a plan; bytes are of one GPU.

    Attributes:
        deployment: what was asked.
        weights: by kind.
        program: of the step programs.
        floors: by step; None where the step-time model does not know the types.
    """

    deployment: Deployment
    weights: tuple[WeightPart, ...]
    program: ProgramNeed
    floors: Mapping[str, Floor] | None

    @property
    def weight_bytes(self) -> int:
        """Weights on each GPU."""
        return sum(part.held_per_gpu(self.deployment.gpus) for part in self.weights)

    @property
    def stored_weight_bytes(self) -> int:
        """The same, were all held as the checkpoint stores them."""
        return sum(part.stored_per_gpu(self.deployment.gpus) for part in self.weights)

    @property
    def matrix_bytes(self) -> int:
        """The same without routers, norms and the MTP layer's merge."""
        gpus = self.deployment.gpus
        return sum(part.stored_per_gpu(gpus) for part in self.weights if part.name != REST)

    @property
    def copied_weight_bytes(self) -> int:
        """Weights on each GPU, if nothing but the routed experts were split."""
        experts = next(part for part in self.weights if part.name == ROUTED)
        whole = sum(part.held for part in self.weights if part is not experts)
        return whole + experts.held_per_gpu(self.deployment.gpus)

    def token_bytes(self, *, mtp: bool) -> int:
        """Bytes of a token in the cache, with or without the MTP layer's planes.

        53,940 = 656 x 78 + 132 x 21 without them for GLM-5.3 in fp8_ds_mla.
        """
        config = self.deployment.config
        if not mtp:
            config = config.replace(num_nextn_predict_layers=0)
        return entry_bytes(config, cache_format_of(config, self.deployment.kv_cache_dtype))

    def load_bytes(self, *, mtp: bool) -> int:
        """Cache of the asked requests on the busiest GPU, pad tokens of last pages not counted."""
        asked = self.deployment
        return asked.seqs_per_gpu * asked.context * self.token_bytes(mtp=mtp)

    @property
    def page_bytes(self) -> int:
        """One page in all planes, the MTP layer's too: the engine always allots those."""
        return PAGE_SIZE * self.token_bytes(mtp=True)

    @property
    def free_bytes(self) -> int:
        """What weights and programs leave; negative where they do not fit."""
        return GPU_BYTES - self.weight_bytes - self.program.peak

    @property
    def pages(self) -> int:
        """Pages that fit, the reserved page 0 included."""
        return max(0, self.free_bytes) // self.page_bytes

    @property
    def needed_pages(self) -> int:
        """Pages of the asked requests, page 0 included."""
        return self.deployment.seqs_per_gpu * self.deployment.pages_per_seq + 1

    @property
    def seqs_that_fit(self) -> int:
        """Requests of the asked context that fit on all GPUs together."""
        return max(0, self.pages - 1) // self.deployment.pages_per_seq * self.deployment.gpus

    @property
    def used_share(self) -> float:
        """Weights, programs and the asked pages as a share of the GPU's memory."""
        return 1 - (self.free_bytes - self.needed_pages * self.page_bytes) / GPU_BYTES


def make_plan(deployment: Deployment, program: ProgramNeed) -> Plan:
    """Work out all figures.

    Raises:
        ValueError: the cache's type does not fit the model.
    """
    cache_format_of(deployment.config, deployment.kv_cache_dtype)
    weights = weight_parts(deployment.config, deployment.weight_dtype)
    return Plan(deployment, weights, program, _floors(deployment))


def _floors(deployment: Deployment) -> Mapping[str, Floor] | None:
    if (deployment.weight_dtype, deployment.kv_cache_dtype) != ("fp8", "fp8_ds_mla"):
        return None
    return {name: _floor(deployment, cell) for name, cell in deployment.steps().items()}


def _floor(deployment: Deployment, cell: Cell) -> Floor:
    node = Hardware(gpus=deployment.gpus)
    if deployment.gpus == 1:
        node = node._replace(collective=0.0)
    # For one limit alone everything else is infinitely fast.
    no_memory = {"memory": math.inf, "cache": math.inf}
    no_compute = {"bf16": math.inf, "fp8": math.inf}
    no_link = {"link": math.inf, "collective": 0.0}

    def seconds(hardware: Hardware) -> float:
        step_time = H200StepTime(deployment.config, hardware, drafts=deployment.drafts)
        return step_time.floor(cell, deployment.context)

    return Floor(
        memory=seconds(node._replace(**no_compute, **no_link)),
        compute=seconds(node._replace(**no_memory, **no_link)),
        link=seconds(node._replace(**no_memory, **no_compute)),
        total=seconds(node),
    )
