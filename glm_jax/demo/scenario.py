"""What happens in the demo: N requests are decoding, then a long prompt arrives; host-only."""

from dataclasses import dataclass, fields
from typing import Any

from glm_jax.engine.config import EngineConfig

# Tokens that every decoding request has when the long prompt arrives: enough for a steady rhythm.
SETTLED_TOKENS = 3


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Sizes of the scenario, all in tokens but the first and the last.

    The embedded model's cost on a CPU is by row, so a small chunk computes the long prompt as fast
    as a large one and keeps the gaps short. On an accelerator, raise it.

    Attributes:
        requests: N, the requests that are decoding when the long prompt arrives.
        prompt_length: The prompt of each of those.
        arrival_length: The long prompt.
        chunk: The most prefill rows of a step, the same under every policy.
        max_tokens: What every request generates, the arriving one included.
        drafts: Draft tokens that every decoding request verifies per step.
    """

    requests: int = 7
    prompt_length: int = 192
    arrival_length: int = 2048
    chunk: int = 64
    max_tokens: int = 64
    drafts: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes below 1, and outputs that would end before the long prompt is computed."""
        for field in fields(self):
            value = getattr(self, field.name)
            low = 0 if field.name == "drafts" else 1
            if value < low:
                raise ValueError(f"{field.name} is {value}; allowed: an integer >= {low}.")
        if self.max_tokens < self._most_tokens_before_first():
            raise ValueError(
                f"max_tokens is {self.max_tokens}, but a decoding request may have "
                f"{self._most_tokens_before_first()} tokens before the long prompt is computed. "
                "Raise max_tokens or chunk, or lower arrival_length, prompt_length or requests."
            )

    def _most_tokens_before_first(self) -> int:
        """Return a bound on the tokens that the oldest request has at the newcomer's first."""
        settling = self.requests + -(-self.requests * self.prompt_length // self.chunk)
        steps = settling + SETTLED_TOKENS + -(-self.arrival_length // self.chunk)
        return steps * (1 + self.drafts)

    def engine_options(self) -> dict[str, Any]:
        """Return the options of an engine made for this scenario.

        Three programs, since starting up is mostly compiling: chunks alone, decodes alone, both.
        With drafts every group has the rows of all of them, in mixed steps too.
        The pool holds all requests to their end, so that no policy preempts.
        """
        page_size = EngineConfig.page_size
        lengths = [self.prompt_length] * self.requests + [self.arrival_length]
        pages = sum(-(-(length + self.max_tokens) // page_size) for length in lengths)
        return {
            "max_model_len": max(lengths) + self.max_tokens,
            "max_num_seqs": len(lengths),
            "max_num_batched_tokens": self.chunk,
            "prefill_buckets": (self.chunk,),
            "group_buckets": (len(lengths),),
            "page_size": page_size,
            "num_pages": pages + 1,
            "watermark": 0.0,
            # One width, or there would be twice as many programs.
            "num_speculative_tokens": self.drafts,
            "decode_widths": (self.drafts + 1,),
            # What is timed must not share the processors with a compilation.
            "grid_warm": "all",
        }
