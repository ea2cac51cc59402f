"""Metrics of an engine for Prometheus, fed with the records of its steps."""

from prometheus_client import CollectorRegistry, generate_latest

from bucketing.cell import Cell
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.declined import Reason
from glm_jax.engine.modes import Mode
from glm_jax.engine.outputs import StepRecord
from glm_jax.observe.interference import Interference
from glm_jax.observe.metric_families import (
    FRACTIONS,
    HOST,
    RATIOS,
    STEP,
    STEP_TOKENS,
    Families,
)
from glm_jax.observe.request_metrics import RequestMetrics

# Waiting for what others hold; the rest waits for something that is being made.
_DEFERRED = (Reason.WRITING, Reason.HELD, Reason.POLICY)


class Metrics:
    """All metrics of one engine; its ``add`` is for the engine's ``watches``.

    Attributes:
        registry: For a page of metrics; each engine has its own.
    """

    def __init__(self, config: EngineConfig, *, model_name: str = "glm", engine: str = "0") -> None:
        """Start at zero.

        Args:
            config: The engine's options.
            model_name: The label "model_name" of every metric.
            engine: The label "engine".
        """
        families = Families(model_name, engine)
        self.registry: CollectorRegistry = families.registry
        self._requests = RequestMetrics(families)
        self._queues = _Queues(families, config)
        self._drafts = _Drafts(families)
        self._steps = _Steps(families, config)
        _cache_info(families, config)

    def add(self, record: StepRecord) -> None:
        """Take a step."""
        self._requests.add(record)
        if record.cell is None:
            if record.fault is not None:
                self._steps.fault(record)
            return
        self._queues.add(record)
        self._steps.add(record)
        if record.drafts:
            self._drafts.add(record)

    def compiled(self, program: str, source: str, seconds: float) -> None:
        """Count a program that became available; from any thread.

        Args:
            program: Its name.
            source: "compiled" or "loaded".
            seconds: What was spent on it.
        """
        self._steps.compiled(program, source, seconds)

    def page(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Queues:
    """Requests, pages and prefix cache."""

    def __init__(self, families: Families, config: EngineConfig) -> None:
        gauge, counter, counters = families.gauge, families.counter, families.counters
        self._pages = config.pool_pages - 1
        self._running = gauge("vllm:num_requests_running", "Requests with a slot.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests without a slot.")
        self._by_reason = families.gauges(
            "vllm:num_requests_waiting_by_reason", "Requests without rows by why.", "reason"
        )
        self._usage = gauge("vllm:kv_cache_usage_perc", "Pages that are owned; 1 is all.")
        self._queried = counter(
            "vllm:prefix_cache_queries", "Tokens asked for in the prefix cache."
        )
        self._hits = counter("vllm:prefix_cache_hits", "Tokens found there.")
        self._cached = counter("vllm:prompt_tokens_cached", "Tokens found there.")
        self._source = counters(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", "source"
        )
        self._preempted = counter("vllm:num_preemptions", "Requests that lost their pages.")
        self._declined = counters(
            "glm_jax:mixed_declined", "Requests that got no rows in a step, by why.", "reason"
        )
        self._waits = counter(
            "glm_jax:prefix_waits", "Requests that waited a step for a page being written."
        )

    def add(self, record: StepRecord) -> None:
        occupancy = record.occupancy
        self._running.set(occupancy.running)
        self._waiting.set(occupancy.waiting)
        self._usage.set(1 - occupancy.free_pages / self._pages)
        deferred = capacity = 0
        for note in record.declined:
            self._declined.of(note.reason).inc(note.count)
            if note.reason in _DEFERRED:
                deferred += note.count
            else:
                capacity += note.count
        self._by_reason.of("deferred").set(deferred)
        self._by_reason.of("capacity").set(capacity)
        if record.queried_tokens:
            self._queried.inc(record.queried_tokens)
            self._hits.inc(record.cached_tokens)
            self._cached.inc(record.cached_tokens)
            self._source.of("local_cache_hit").inc(record.cached_tokens)
        computed = sum(rows.known for rows in record.rows if rows.prefill)
        if computed and record.fault is None:
            self._source.of("local_compute").inc(computed)
        if record.preempted:
            self._preempted.inc(len(record.preempted))
        if record.prefix_waits:
            self._waits.inc(record.prefix_waits)


class _Drafts:
    """What became of drafts."""

    def __init__(self, families: Families) -> None:
        counter = families.counter
        self._groups = counter("vllm:spec_decode_num_drafts", "Groups with drafts verified.")
        self._tokens = counter("vllm:spec_decode_num_draft_tokens", "Drafts verified.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.")
        self._per_position = families.counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts accepted.", "position"
        )

    def add(self, record: StepRecord) -> None:
        self._groups.inc(len(record.drafts))
        self._tokens.inc(record.draft_tokens)
        accepted = [group.accepted for group in record.drafts]
        self._accepted.inc(sum(accepted))
        for position in range(max(accepted)):
            count = sum(one > position for one in accepted)
            self._per_position.of(str(position)).inc(count)


class _Steps:
    """Steps by kind, cell and mode; rows, pads, times."""

    def __init__(self, families: Families, config: EngineConfig) -> None:
        counters, histogram = families.counters, families.histogram
        histograms = families.histograms
        self._count = counters("glm_jax:step", "Steps.", "kind", "cell", "mode")
        self._missed = counters("glm_jax:grid_miss", "Steps that were not FULL.", "reason")
        self._seconds = histograms("glm_jax:step_seconds", "Time of a step.", STEP, "kind", "cell")
        self._rows = counters("glm_jax:step_rows", "Rows computed.", "segment")
        self._padding = histogram("glm_jax:padding_ratio", "Pads of a step's rows.", FRACTIONS)
        self._tokens = histogram("vllm:iteration_tokens_total", "Useful rows.", STEP_TOKENS)
        self._decode = histograms(
            "glm_jax:decode_latency_seconds",
            "Time of a step with decodes, by the prefill bucket beside them.",
            STEP,
            "prefill_bucket",
        )
        self._added = histograms(
            "glm_jax:prefill_interference_seconds",
            "Time of a mixed step above the median decode step of its groups.",
            STEP,
            "prefill_bucket",
        )
        self._host = histogram("glm_jax:host_seconds", "Host time of a step.", HOST)
        self._gap = histogram("glm_jax:host_gap_seconds", "Time between two steps.", HOST)
        self._late = histogram(
            "glm_jax:prediction_ratio", "Time of a FULL step over what was predicted.", RATIOS
        )
        self._uneven = histogram(
            "glm_jax:moe_imbalance_ratio", "Rows of the busiest expert over the mean.", RATIOS
        )
        self._most = families.gauge("glm_jax:moe_tokens_per_expert_max", "Of the last step.")
        self._mean = families.gauge("glm_jax:moe_tokens_per_expert_mean", "Of the last step.")
        self._pairs = families.counter("glm_jax:indexer_scored_pairs", "Scored by each full layer.")
        self._loops = families.counter("glm_jax:loop_steps", "Steps that ran in decode loops.")
        self._faults = counters("glm_jax:faults", "Steps that were lost.", "phase")
        self._compiles = counters("glm_jax:compile_events", "Programs that appeared.", "source")
        self._compile_seconds = families.gauges(
            "glm_jax:grid_cell_compile_seconds", "What a program took.", "cell", "source"
        )
        families.gauge("glm_jax:grid_cells", "Cells of the grid.").set(len(config.grid().cells()))
        self._interference = Interference()
        self._last_end: float | None = None

    def add(self, record: StepRecord) -> None:
        cell, wall = record.cell, record.wall_time
        assert cell is not None, f"{record.kind=} without a cell"
        if record.fault is not None:
            self.fault(record)
            return
        name = cell_name(cell)
        self._count.of(record.kind, name, record.mode).inc()
        if record.mode != Mode.FULL:
            self._missed.of(record.mode_reason or "none given").inc()
        self._seconds.of(record.kind, name).observe(wall)
        self._add_rows(record)
        self._add_times(record, cell, wall / record.loop_steps)
        self._pairs.inc(record.pairs)
        if record.loop_steps > 1:
            self._loops.inc(record.loop_steps)
        if record.expert_rows_mean:
            self._most.set(record.expert_rows_max)
            self._mean.set(record.expert_rows_mean)
            self._uneven.observe(record.expert_rows_max / record.expert_rows_mean)

    def fault(self, record: StepRecord) -> None:
        """Count a lost step."""
        self._faults.of((record.fault or "").partition(":")[0]).inc()

    def compiled(self, program: str, source: str, seconds: float) -> None:
        self._compiles.of(source).inc()
        self._compile_seconds.of(program, source).set(seconds)

    def _add_rows(self, record: StepRecord) -> None:
        prefill = sum(rows.known for rows in record.rows if rows.prefill)
        # All steps of a loop; its rows of prefills are none.
        looped = record.loop_steps > 1
        drafts = record.draft_tokens if looped else sum(rows.drafts for rows in record.rows)
        useful = record.prefill_rows + record.loop_rows
        pads = record.pad_rows
        for segment, count in (
            ("prefill", prefill),
            ("decode", useful - prefill - drafts),
            ("draft", drafts),
            ("pad", pads),
        ):
            self._rows.of(segment).inc(count)
        self._tokens.observe(useful)
        first = record.prefill_rows + record.decode_rows
        self._padding.observe(pads / (first + pads))

    def _add_times(self, record: StepRecord, cell: Cell, seconds: float) -> None:
        """Take what one step of a dispatch took."""
        phases = record.phases
        self._host.observe(sum(phases) - phases.device)
        if self._last_end is not None:
            self._gap.observe(max(0.0, record.started - self._last_end))
        self._last_end = record.started + record.wall_time
        if record.mode == Mode.FULL and record.predicted:
            self._late.observe(record.wall_time / record.predicted)
        bucket = str(cell.prefill)
        if record.kind == "decode":
            self._decode.of(bucket).observe(seconds)
            if not cell.prefill and record.mode == Mode.FULL:
                self._interference.decode(cell, seconds)
        elif record.kind == "mixed":
            self._decode.of(bucket).observe(seconds)
            added = self._interference.mixed(cell, seconds)
            if added is not None:
                self._added.of(bucket).observe(added)


def cell_name(cell: Cell) -> str:
    """Return a cell as a label: prefill rows x groups x width."""
    return f"{cell.prefill}x{cell.groups}x{cell.width}"


def _cache_info(families: Families, config: EngineConfig) -> None:
    labels = {
        "block_size": str(config.page_size),
        "num_gpu_blocks": str(config.pool_pages),
        "cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": str(config.enable_prefix_caching),
    }
    info = families.gauges("vllm:cache_config_info", "Options of the cache.", *labels)
    info.of(*labels.values()).set(1)
