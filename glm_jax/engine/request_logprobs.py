"""Log-probabilities of one request, from its prompt to its last token; host-only."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from glm_jax.engine.config import EngineConfig
from glm_jax.engine.logprob import Logprob, PositionLogprobs
from glm_jax.engine.outputs import CompletionOutput, StreamDelta
from glm_jax.engine.plan import PlanEntry
from glm_jax.engine.request import Request
from glm_jax.sampling.params import SamplingParams
from glm_jax.sampling.row_logprobs import RowLogprobs


class RequestLogprobs:
    """What one request asked for and has got so far.

    Attributes:
        outputs: Of its tokens; None where it did not ask for them.
        cumulative: The sum of its tokens' own.
        further: The ids it wants at every output token, whatever their rank.
    """

    def __init__(self, request: Request, decode: Callable[[int], str] | None) -> None:
        """Start with nothing.

        Args:
            request: A new one.
            decode: Gives the text of a token; None where nothing is detokenised.
        """
        params = request.params
        self._request = request
        self._decode = decode
        self._top = params.logprobs or 0
        self._prompt_top = params.prompt_logprobs
        self._prompt_known = 0
        self._prompt_parts: list[RowLogprobs] = []
        self._prompt: list[PositionLogprobs | None] | None = None
        self.further = tuple(dict.fromkeys(params.logprob_token_ids or ()))
        self.outputs: list[PositionLogprobs] | None = [] if of_outputs(params) else None
        self.cumulative = 0.0

    def prompt_rows(self, entry: PlanEntry) -> range:
        """The positions of a plan's rows whose next token is the prompt's and new to it.

        A row that is computed again, after its request lost its pages, is not.
        """
        known, last = self._prompt_known, self._request.prompt_length - 1
        if self._prompt_top is None or known == last:
            return range(0)
        first = entry.request.computed
        assert first <= known, f"{entry.request} skipped rows of its prompt from {known} on"
        return range(known, max(known, min(first + entry.known, last)))

    def take_prompt(self, answer: RowLogprobs) -> None:
        """Keep what the head program said of the positions of ``prompt_rows``."""
        self._prompt_known += len(answer.target)
        target, rank, top_ids, top, further = answer
        most = self._prompt_top
        # Copies: a view would keep all that the program answered.
        cut = target, rank, top_ids[:, :most], top[:, :most], further[:, :0]
        self._prompt_parts.append(RowLogprobs(*(array.copy() for array in cut)))

    def read_drawn(self, tokens: Sequence[int], answer: RowLogprobs) -> list[PositionLogprobs]:
        """What the head program said of the rows that drew tokens; nothing is kept of it yet."""
        return list(self._positions(tokens, answer, self._top, self.further))

    def added_to(self, delta: StreamDelta, drawn: Sequence[PositionLogprobs]) -> StreamDelta:
        """Keep those of the tokens of a stream piece, and return the piece with them.

        Args:
            delta: Its tokens are those that stay.
            drawn: Of the tokens that its step drew.
        """
        if delta.token_ids and len(delta.token_ids) == self._request.num_output_tokens:
            delta = delta._replace(prompt_logprobs=self.prompt())
        if self.outputs is None:
            return delta
        kept = list(drawn[: len(delta.token_ids)])
        for token, position in zip(delta.token_ids, kept, strict=True):
            self.cumulative += position[token].logprob
        self.outputs += kept
        return delta._replace(logprobs=kept)

    def completed(self, completion: CompletionOutput) -> CompletionOutput:
        """A result with those of its tokens."""
        if self.outputs is None:
            return completion
        own = {"logprobs": list(self.outputs), "cumulative_logprob": self.cumulative}
        return dataclasses.replace(completion, **own)

    def prompt(self) -> list[PositionLogprobs | None] | None:
        """Of the prompt's tokens, None for the first; None until the first token was drawn."""
        if self._prompt_top is None or not self._request.num_output_tokens:
            return None
        if self._prompt is None:
            tokens = iter(self._request.prompt_token_ids[1:])
            parts = ([next(tokens) for _ in part.target] for part in self._prompt_parts)
            read = (
                self._positions(part_tokens, part, self._prompt_top, ())
                for part_tokens, part in zip(parts, self._prompt_parts, strict=True)
            )
            self._prompt = [None, *chain.from_iterable(read)]
            self._prompt_parts.clear()
        return self._prompt

    def _positions(
        self, tokens: Sequence[int], answer: RowLogprobs, top: int, further: Sequence[int]
    ) -> Iterable[PositionLogprobs]:
        """Yield what an answer holds, row by row."""
        target, rank, top_ids, best, more = (array.tolist() for array in answer)
        for row, token in enumerate(tokens):
            found = {token: self._logprob(token, target[row], rank[row])}
            for place, id_ in enumerate(top_ids[row][:top]):
                found[id_] = self._logprob(id_, best[row][place], place + 1)
            for place, id_ in enumerate(further):
                if id_ not in found:
                    found[id_] = self._logprob(id_, more[row][place], None)
            yield found

    def _logprob(self, token: int, logprob: float, rank: int | None) -> Logprob:
        return Logprob(logprob, rank, self._decode(token) if self._decode else None)


def of_outputs(params: SamplingParams) -> bool:
    """Whether a request wants log-probabilities of the tokens it draws."""
    return params.logprobs is not None or params.logprob_token_ids is not None


def of_anything(params: SamplingParams) -> bool:
    """Whether a request wants any log-probabilities."""
    return of_outputs(params) or params.prompt_logprobs is not None


def check_logprobs(params: SamplingParams, config: EngineConfig, vocab_size: int) -> None:
    """Refuse more log-probabilities than the head program gives, and ids that are no tokens.

    Raises:
        ValueError: With the limit.
    """
    ids = params.logprob_token_ids or ()
    for name, count in (
        ("logprobs", params.logprobs),
        ("prompt_logprobs", params.prompt_logprobs),
        ("the length of logprob_token_ids", len(ids)),
    ):
        if count is not None and count > config.max_logprobs:
            raise ValueError(
                f"{name} is {count}; allowed: at most {config.max_logprobs}. Ask for fewer, or "
                "raise the engine option max_logprobs."
            )
    if ids and max(ids) >= vocab_size:
        raise ValueError(
            f"logprob_token_ids holds {max(ids)}; allowed: 0 to {vocab_size - 1}, the model's "
            "token ids. Leave it out."
        )
