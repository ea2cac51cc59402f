"""The engine's options in one frozen object; host-only. Nothing else configures the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from bucketing.axis import Axis
from bucketing.cell import Cell
from bucketing.grid import Grid
from bucketing.step_inputs import Limits
from glm_jax.sampling.params import check_names

_CHOICES = {
    "step_policy": ("mixed", "prefill_first", "alternate"),
    "scheduling_policy": ("fcfs", "priority"),
    "dtype": ("auto", "float32", "bfloat16"),
    "weight_dtype": ("auto", "float32", "bfloat16", "fp8"),
    "kv_cache_dtype": ("auto", "float32", "bfloat16", "fp8_ds_mla"),
    "layer_storage": ("auto", "stacked", "per_layer"),
    "layer_loop": ("auto", "unrolled", "scan"),
    "execution_mode": ("auto", "full", "piecewise", "eager"),
    "decode_path": ("groups", "extend"),
    "kernels": ("auto", "reference", "xla", "mosaic_gpu"),
    "grid_warm": ("none", "hot", "all"),
}
# GLM-5.3's MTP layer was trained for five steps ahead.
MAX_DRAFTS = 5
AUTO_WIDTHS = (1, 2, 4, 6)
_SMALLEST = {
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "page_size": 1,
    "max_num_partial_prefills": 1,
    "long_prefill_token_threshold": 0,
    "seed": 0,
    "decode_loop_steps": 0,
    "max_logprobs": 0,
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs; vLLM's names for what vLLM names.

    Attributes:
        max_model_len: The most tokens of a request, prompt and output together.
        max_num_seqs: The most requests running at once: slots, and groups of a step.
        max_num_batched_tokens: The most prefill rows of a step and exactly the largest prefill
            bucket. Decode rows are not charged to it; they are bounded by max_num_seqs * width.
        page_size: Tokens per cache page.
        num_pages: Pages of the pool, the reserved page 0 included; None holds max_num_seqs
            requests of max_model_len.
        prefill_buckets: Sizes of the prefill segment, cut at max_num_batched_tokens.
        group_buckets: Sizes of the decode segment in groups, cut at max_num_seqs.
        num_speculative_tokens: Draft tokens that a decoding request verifies per step, 0 to 5; the
            model's MTP layer makes them. "auto" lets the scheduler choose, step by step, what the
            measured acceptance and step times are worth.
        decode_loop_steps: Decode steps that the device may run in one dispatch; 0 is off. A loop
            ends early when a request ends or needs a page. Stop strings, log-probabilities of
            tokens, a waiting request and prefill rows keep a step single.
        tbt_target_ms: The most time between two tokens that users should see. A loop is cut so
            that, as predicted, an arriving request waits no longer; None leaves it whole.
        decode_widths: Rows per decode group; all groups of a step have one width. None is (1,)
            without drafts, (1, k + 1) with k, (1, 2, 4, 6) for "auto".
        grid_cells: The compiled cells, (P, G, Q) each, where they are not all combinations of the
            buckets and widths; then the bucket lists do not count. See `grid_options`.
        max_step_ms: Cut prefill rows so that a step is predicted to take at most this long; None
            is off. The smallest prefill bucket is always allowed, or prefills would starve. Before
            the first steps were timed the prediction is a guess.
        long_prefill_token_threshold: The most rows of one prompt per step while another request
            is running or waiting; 0 is off, otherwise at least one page.
        long_prefill_token_threshold_adaptive: Raise that cap to an equal share of the budget when
            few requests want prefill.
        max_num_partial_prefills: The most requests that may be in the middle of their prompt.
        watermark: Fraction of the pool that admission leaves free for running requests to grow.
        enable_prefix_caching: Let requests begin with the pages of others that have the same
            tokens (and the same cache salt).
        scheduling_policy: "fcfs" serves first who came first; "priority" the lowest priority value,
            then who came first. What runs is preempted from the end of that order.
        max_queued_requests: The most requests that may wait; more are refused. None is any number.
        split_steps: Run every step as two halves, one after the other, where no request reads
            pages that the step writes. Slower here: it is for comparison, and for overlapping
            communication of one half with the other's work.
        max_overtakes: How many later requests may be admitted before one that waits for pages.
        step_policy: "mixed" serves decodes and prefills in one step. "prefill_first" and
            "alternate" never mix (chunks first, or chunk and decode in turn): for comparison.
        seed: Base of the seeds of requests that bring none.
        dtype: What is computed in, and the type of weights and cache where their own options name
            no other; "auto" is float32 on CPU, where bfloat16 is never faster, and bfloat16
            elsewhere. What decides (router, scores, sampling) stays float32.
        weight_dtype: How weights are held; those of another type than dtype are cast when they are
            used. "fp8" holds the large matrices as the published FP8 checkpoints do, e4m3 values
            with a float32 scale per 128 x 128, and the rest in dtype; they are widened where they
            are multiplied; the GPU's kernels round the rows to bfloat16. "auto" is "fp8" off the
            CPU for an FP8 checkpoint that is computed in bfloat16, if the model's widths have an
            FP8 form, else as dtype (on CPU FP8 takes less memory and more time).
        kv_cache_dtype: How the cache stores entries; "auto" is as dtype. "fp8_ds_mla" is 656 bytes
            an entry (FlashMLA's layout) and 132 an index key (DeepGEMM's), 576 and 128 values, for
            models of exactly these widths.
        latent_norm_eps: Epsilon of the latent norms; None takes the model config's.
        layer_storage: How layer weights are held; "auto" chooses by platform.
        layer_loop: How the layers are traced; "auto" chooses by platform.
        execution_mode: "auto" runs a step by its cell's one program, and piece by piece where that
            is not compiled. "full" never runs pieces, "piecewise" always, "eager" runs operator
            by operator (slow; to debug and to compare).
        piecewise_buckets: Sizes of the row axis of pieces, cut at the most rows of a step.
        decode_path: "groups" lets the rows of a decode group share one read of its keys. "extend"
            sends decode rows through the path of prefill rows, as some engines do: for comparison.
        kernels: Implementation of the operators in ``pallas_kernels``: "mosaic_gpu" for Hopper
            GPUs, "xla" for CPUs, "reference" is slow and obvious; "auto" chooses by platform. EAGER
            steps always take the reference, whose operators have no loops to run in Python.
        grid_warm: Which cells are compiled before the first request: "all"; "hot", those that most
            steps use (``bucketing.hot_cells``); "none". The others follow in the background, from
            child processes, while their steps run piece by piece.
        gpu_memory_utilization: The share of the device's memory (on CPU, of the available RAM)
            that weights, pages and programs may take together.
        xla_flags: XLA's compiler options for every program, "name=value" each; `LLM` takes those
            of the platform (``xla_flags.platform_flags``) where none are given.
        max_logprobs: The most log-probabilities that a request may ask for at one token.
        skip_tokenizer_init: Work on token ids only.
    """

    max_model_len: int = 4096
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    page_size: int = 64
    num_pages: int | None = None
    prefill_buckets: Sequence[int] = (64, 512)
    group_buckets: Sequence[int] = (1, 8)
    num_speculative_tokens: int | str = 0
    decode_loop_steps: int = 0
    tbt_target_ms: float | int | None = None
    decode_widths: Sequence[int] | None = None
    grid_cells: Sequence[Sequence[int]] | None = None
    max_step_ms: float | int | None = None
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    max_num_partial_prefills: int = 4
    watermark: float | int = 0.01
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    max_queued_requests: int | None = None
    max_overtakes: int = 0
    split_steps: bool = False
    step_policy: str = "mixed"
    seed: int = 0
    dtype: str = "auto"
    weight_dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    latent_norm_eps: float | int | None = None
    layer_storage: str = "auto"
    layer_loop: str = "auto"
    execution_mode: str = "auto"
    piecewise_buckets: Sequence[int] = (8, 32, 128, 512, 2048)
    decode_path: str = "groups"
    kernels: str = "auto"
    grid_warm: str = "hot"
    gpu_memory_utilization: float | int = 0.9
    xla_flags: Sequence[str] = ()
    max_logprobs: int = 20
    skip_tokenizer_init: bool = False

    def __new__(cls, *_: Any, **options: Any) -> "EngineConfig":
        """Refuse unknown names with the list of allowed ones, before __init__ sees them."""
        check_names("engine option", options, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check every value and make the bucket lists tuples."""
        self._check_speculation()
        for name in ("prefill_buckets", "group_buckets", "decode_widths", "piecewise_buckets"):
            object.__setattr__(self, name, _sizes(name, getattr(self, name)))
        if self.grid_cells is not None:
            cells = tuple(_sizes("a cell of grid_cells", cell) for cell in self.grid_cells)
            object.__setattr__(self, "grid_cells", cells)
        object.__setattr__(self, "xla_flags", _flags(self.xla_flags))
        for name, low in _SMALLEST.items():
            _check_integer(name, getattr(self, name), low)
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; allowed: "
                    f"{', '.join(repr(choice) for choice in allowed)}."
                )
        self._check_pool()
        self._check_threshold()
        # Both raise with the reason where the lists make no grid.
        self.grid()

    def _check_pool(self) -> None:
        if self.num_pages is not None:
            _check_integer("num_pages", self.num_pages, 2)
        if self.max_queued_requests is not None:
            _check_integer("max_queued_requests", self.max_queued_requests, 1)
        if not isinstance(self.watermark, Real) or not 0 <= self.watermark < 1:
            raise ValueError(
                f"watermark is {self.watermark!r}; allowed: a fraction of the pool, >= 0 and < 1."
            )
        eps = self.latent_norm_eps
        if eps is not None and (not isinstance(eps, Real) or not 0 < eps < 1):
            raise ValueError(
                f"latent_norm_eps is {eps!r}; allowed: None or a number above 0 and below 1."
            )

        share = self.gpu_memory_utilization
        if not isinstance(share, Real) or isinstance(share, bool) or not 0 < share <= 1:
            raise ValueError(
                f"gpu_memory_utilization is {share!r}; allowed: a fraction above 0, at most 1."
            )
        for name in ("max_step_ms", "tbt_target_ms"):
            most = getattr(self, name)
            if most is None:
                continue
            if not isinstance(most, Real) or isinstance(most, bool) or most <= 0:
                raise ValueError(
                    f"{name} is {most!r}; allowed: None (off) or milliseconds above 0."
                )

    def _check_speculation(self) -> None:
        """Check the draft length, and fill in the widths that go with it."""
        drafts = self.num_speculative_tokens
        known = isinstance(drafts, Integral) and not isinstance(drafts, bool)
        if drafts != "auto" and not (known and 0 <= int(drafts) <= MAX_DRAFTS):
            raise ValueError(
                f"num_speculative_tokens is {drafts!r}; allowed: 0 to {MAX_DRAFTS}, or 'auto'."
            )
        if self.decode_widths is None:
            widths = AUTO_WIDTHS if drafts == "auto" else tuple(sorted({1, int(drafts) + 1}))
            object.__setattr__(self, "decode_widths", widths)
        elif drafts == "auto" and max(self.decode_widths, default=2) == 1:
            raise ValueError(
                f"num_speculative_tokens 'auto' needs a group of 2 rows or more, but decode_widths "
                f"are {tuple(self.decode_widths)}. Add a width, or leave decode_widths out."
            )
        elif drafts != "auto" and 0 < max(self.decode_widths, default=0) <= int(drafts):
            raise ValueError(
                f"num_speculative_tokens {drafts} needs a group of {int(drafts) + 1} rows, but "
                f"decode_widths are {tuple(self.decode_widths)}. Add that width, or leave "
                "decode_widths out."
            )

    @property
    def num_drafts(self) -> int:
        """k, the most drafts of a request."""
        if self.num_speculative_tokens == "auto":
            return min(MAX_DRAFTS, self.widths[-1] - 1)
        return int(self.num_speculative_tokens)

    @property
    def widths(self) -> tuple[int, ...]:
        """The decode widths, filled in."""
        assert self.decode_widths is not None, "filled in when the options were checked"
        return tuple(self.decode_widths)

    def _check_threshold(self) -> None:
        threshold = self.long_prefill_token_threshold
        if 0 < threshold < self.page_size:
            raise ValueError(
                f"long_prefill_token_threshold is {threshold}; allowed: 0 (off) or at least one "
                f"page ({self.page_size} tokens)."
            )
        if self.long_prefill_token_threshold_adaptive and threshold == 0:
            raise ValueError(
                "long_prefill_token_threshold_adaptive raises long_prefill_token_threshold, "
                "which is 0 (off). Set a threshold of at least one page."
            )

    @property
    def pages_per_seq(self) -> int:
        """W, pages of a request of max_model_len."""
        return -(-self.max_model_len // self.page_size)

    @property
    def pool_pages(self) -> int:
        """Pages of the pool, the reserved page 0 included."""
        if self.num_pages is not None:
            return self.num_pages
        return self.max_num_seqs * self.pages_per_seq + 1

    def limits(self) -> Limits:
        """Return what the arrays of a step depend on besides the cell."""
        return Limits(
            self.max_num_seqs, self.pages_per_seq, self.page_size, num_drafts=self.num_drafts
        )

    @property
    def widest(self) -> Cell:
        """The cell that holds every step; steps that run piece by piece are packed for it."""
        return Cell(self.max_num_batched_tokens, self.max_num_seqs, self.widths[-1])

    def piecewise_axis(self) -> Axis:
        """Return the row axis of pieces; its largest bucket holds every step."""
        return Axis.cut("rows", self.piecewise_buckets, self.widest.rows)

    def grid(self) -> Grid:
        """Return the grid; its largest buckets are the token budget and max_num_seqs exactly."""
        if self.grid_cells is not None:
            return Grid.from_cells(
                self.grid_cells,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_num_seqs=self.max_num_seqs,
                widths=self.widths,
            )
        return Grid(
            Axis.cut("prefill rows", self.prefill_buckets, self.max_num_batched_tokens),
            Axis.cut("groups", self.group_buckets, self.max_num_seqs),
            self.widths,
        )


def grid_options(grid: Grid) -> dict[str, Any]:
    """Return the engine options that give a config this grid, for one read from a grid file."""
    return {
        "max_num_batched_tokens": grid.prefill.largest,
        "max_num_seqs": grid.max_num_seqs,
        "decode_widths": grid.widths,
        "grid_cells": grid.cells(),
    }


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    """Return the sizes as a tuple of ints, or raise ValueError."""
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    if not listed or not all(isinstance(size, Integral) and int(size) >= 0 for size in value):
        raise ValueError(f"{name} is {value!r}; allowed: a list of integers >= 0.")
    return tuple(int(size) for size in value)


def _flags(value: Any) -> tuple[str, ...]:
    """Return XLA's flags as a tuple, or raise ValueError."""
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    if not listed or not all(isinstance(flag, str) and "=" in flag[1:] for flag in value):
        raise ValueError(f'xla_flags is {value!r}; allowed: a list of "name=value".')
    return tuple(value)


def _check_integer(name: str, value: Any, low: int) -> None:
    """Raise ValueError unless value is an integer of at least `low`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} is {value!r}; allowed: an integer >= {low}.")
