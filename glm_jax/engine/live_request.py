"""What the engine keeps of a request besides the scheduler's state, until it is handed out."""

from dataclasses import replace

import numpy as np

from glm_jax.engine.outputs import CompletionOutput, DraftCounts, GroupDrafts, RequestOutput
from glm_jax.engine.request import Request
from glm_jax.engine.request_logprobs import RequestLogprobs
from glm_jax.engine.request_times import RequestTimes
from glm_jax.engine.text_stream import TextStream


class LiveRequest:
    """A request with its text, the logits and log-probabilities it wants, and its drafts' fate.

    Attributes:
        request: The scheduler's.
        parent_id: Id of the user's request.
        index: Of its completion there.
        prompt: Its text; None if it came as token ids.
        stream: Makes its text; None where nobody wants one.
        logits: Of its prompt's rows, `[T, V]`; None where nobody wants them.
        logprobs: Its log-probabilities; None where nobody wants any.
        times: When what happened to it.
    """

    __slots__ = (
        "_counts",
        "index",
        "logits",
        "logprobs",
        "parent_id",
        "prompt",
        "request",
        "stream",
        "times",
    )

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        stream: TextStream | None,
        *,
        parent_id: str,
        index: int,
    ) -> None:
        """Keep a request that was just made."""
        self.request = request
        self.parent_id = parent_id
        self.index = index
        self.prompt = prompt
        self.stream = stream
        self.logits: np.ndarray | None = None
        self.logprobs: RequestLogprobs | None = None
        self.times = RequestTimes()
        self._counts = [0, 0, 0]  # the fields of DraftCounts

    @property
    def reads_head(self) -> bool:
        """Whether it wants logits or log-probabilities of rows."""
        return self.logits is not None or self.logprobs is not None

    def count_drafts(self, group: GroupDrafts) -> None:
        """Count one verified group."""
        self._counts[0] += 1
        self._counts[1] += len(group.draft_token_ids)
        self._counts[2] += group.accepted

    def output(self) -> RequestOutput:
        """All of it, as far as it has come."""
        request = self.request
        completion = CompletionOutput(
            text=self.stream.text if self.stream is not None else "",
            token_ids=request.output_token_ids,
            finish_reason=request.finish_reason.value if request.finish_reason else None,
            stop_reason=request.stop_value,
            error=request.error,
            index=self.index,
        )
        prompt_logprobs = None
        if self.logprobs is not None:
            completion = self.logprobs.completed(completion)
            prompt_logprobs = self.logprobs.prompt()
        return RequestOutput(
            request.request_id,
            self.prompt,
            request.prompt_token_ids,
            [completion],
            request.finished,
            DraftCounts(*self._counts),
            prompt_logprobs,
            request.num_cached_tokens,
            replace(self.times),
        )
