"""Metrics of requests: what each waited for, from its arrival to its end."""

from dataclasses import dataclass

from glm_jax.engine.outputs import StepRecord
from glm_jax.engine.step_notes import Arrival
from glm_jax.observe.metric_families import (
    BETWEEN_TOKENS,
    COMPLETIONS,
    FIRST_TOKEN,
    LENGTHS,
    WHOLE_REQUEST,
    Families,
)


@dataclass(slots=True)
class _Life:
    """A request so far; times by ``time.perf_counter``, None before they came."""

    arrival: Arrival
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    tokens: int = 0


class RequestMetrics:
    """Follows every request through the records of steps."""

    def __init__(self, families: Families) -> None:
        """Start without requests."""
        counter, counters = families.counter, families.counters
        self._prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts that were computed.")
        self._generated = counter("vllm:generation_tokens", "Tokens generated.")
        self._ended = counters("vllm:request_success", "Requests that ended.", "finished_reason")
        self._refused = counters("vllm:admission_rejections", "Requests refused.", "reason")

        def seconds(name: str, meaning: str, buckets: tuple[float, ...] = WHOLE_REQUEST):  # noqa: ANN202 - a Histogram
            return families.histogram(f"vllm:{name}", f"{meaning}, in seconds.", buckets)

        self._first = seconds("time_to_first_token_seconds", "Arrival to first token", FIRST_TOKEN)
        self._between = seconds("inter_token_latency_seconds", "Between tokens", BETWEEN_TOKENS)
        self._per_token = seconds(
            "request_time_per_output_token_seconds", "Mean between tokens", BETWEEN_TOKENS
        )
        self._whole = seconds("e2e_request_latency_seconds", "Arrival to end")
        self._queue = seconds("request_queue_time_seconds", "Arrival to first rows")
        self._prefill = seconds("request_prefill_time_seconds", "First rows to first token")
        self._decode = seconds("request_decode_time_seconds", "First to last token")
        self._inference = seconds("request_inference_time_seconds", "First rows to last token")

        def lengths(name: str, meaning: str, buckets: tuple[int, ...] = LENGTHS):  # noqa: ANN202 - a Histogram
            return families.histogram(f"vllm:{name}", f"{meaning}.", buckets)

        self._prompt = lengths("request_prompt_tokens", "Tokens of a prompt")
        self._output = lengths("request_generation_tokens", "Tokens of a completion")
        self._n = lengths("request_params_n", "Completions asked for", COMPLETIONS)
        self._most = lengths("request_params_max_tokens", "Tokens asked for at most")
        self._lives: dict[str, _Life] = {}
        self._unscheduled: set[str] = set()

    def add(self, record: StepRecord) -> None:
        """Take a step."""
        for arrival in record.arrived:
            self._arrive(arrival)
        if record.refused:
            self._refused.of("queue full").inc(record.refused)
        if self._unscheduled:
            for name in self._unscheduled.intersection(record.request_ids):
                self._schedule(name, record.started)
        end = record.started + record.wall_time
        for name, tokens in record.tokens.items():
            if tokens and name in self._lives:
                self._give(self._lives[name], tokens, end)
        for name, reason in record.ended.items():
            self._end(name, reason, end)

    def _arrive(self, arrival: Arrival) -> None:
        self._lives[arrival.request_id] = _Life(arrival)
        self._unscheduled.add(arrival.request_id)
        if arrival.n:
            self._n.observe(arrival.n)
        if arrival.max_tokens is not None:
            self._most.observe(arrival.max_tokens)

    def _schedule(self, name: str, now: float) -> None:
        self._unscheduled.discard(name)
        life = self._lives[name]
        life.scheduled = now
        self._queue.observe(max(0.0, now - life.arrival.time))

    def _give(self, life: _Life, tokens: int, now: float) -> None:
        self._generated.inc(tokens)
        life.tokens += tokens
        if life.last_token is None:
            life.first_token = now
            self._prompt_tokens.inc(life.arrival.prompt_tokens)
            self._first.observe(now - life.arrival.time)
            if life.scheduled is not None:
                self._prefill.observe(now - life.scheduled)
        else:
            # Accepted drafts come together: one wait, as a reader of the stream has it.
            self._between.observe(now - life.last_token)
        life.last_token = now

    def _end(self, name: str, reason: str, now: float) -> None:
        self._ended.of(reason).inc()
        life = self._lives.pop(name, None)
        self._unscheduled.discard(name)
        if life is None:
            return
        self._whole.observe(now - life.arrival.time)
        self._prompt.observe(life.arrival.prompt_tokens)
        self._output.observe(life.tokens)
        if life.first_token is None or life.last_token is None:
            return
        decoding = life.last_token - life.first_token
        self._decode.observe(decoding)
        if life.scheduled is not None:
            self._inference.observe(life.last_token - life.scheduled)
        if life.tokens > 1:
            self._per_token.observe(decoding / (life.tokens - 1))
