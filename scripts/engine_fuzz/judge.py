"""What a request gets alone in the engine, and whether it got the same in company."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from glm_jax import LLM
from glm_jax.engine.logprob import PositionLogprobs
from glm_jax.engine.outputs import CompletionOutput, RequestOutput
from glm_jax.tokenizer import Tokenizer
from scripts.decision_margins import TOLERANCE, decide
from scripts.engine_fuzz.invariants import check
from scripts.engine_fuzz.laws import check_laws
from scripts.engine_fuzz.wish import Wish
from scripts.fuzz_schedules import Arrival, Schedule, make_engine
from scripts.reference_controls import controlled_logits

# The designed tolerance of log-probabilities, and that of raw logits.
LOGPROBS = 1e-5
LOGITS = 1e-4
# The golden model has no end token; this one it draws now and then.
EOS = 30


class Alone(NamedTuple):
    """What a request gets alone: its completion, what is said of its prompt, and its logits."""

    completion: CompletionOutput
    prompt_logprobs: Sequence[PositionLogprobs | None] | None
    logits: np.ndarray | None


class Judge:
    """Compares what requests got with what they get alone.

    Attributes:
        seen: How often what was compared.
        furthest: The largest difference of a log-probability so far.
    """

    def __init__(self, llm: LLM, tokenizer: Tokenizer, think_ids: tuple[int, int]) -> None:
        """Take the model.

        Args:
            llm: Serves requests alone; its head program is compiled.
            tokenizer: Makes text.
            think_ids: The tokens that begin and end a thinking part.
        """
        self.seen: Counter[str] = Counter()
        self.furthest = 0.0
        self._llm = llm
        self._tokenizer = tokenizer
        self._think_ids = think_ids
        self._alone: dict[str, Alone] = {}

    def alone(self, wish: Wish) -> Alone:
        """Return what one completion gets alone: without drafts, in chunks as large as possible."""
        params = {**wish.params, "n": 1}
        logits = bool(wish.extra.get("keep_logits"))
        key = json.dumps([list(wish.prompt), params, logits], sort_keys=True)
        if key not in self._alone:
            self._alone[key] = self._serve(Wish(wish.prompt, params), keep_logits=logits)
        return self._alone[key]

    def forget(self) -> None:
        """Drop what is remembered of requests alone."""
        self._alone.clear()

    def _serve(self, wish: Wish, *, keep_logits: bool) -> Alone:
        whole = Schedule({}, self._llm.config.max_num_batched_tokens, 1, 1, [Arrival(0, 0, None)])
        engine = make_engine(self._llm, whole, tokenizer=self._tokenizer, eos_token_ids=(EOS,))
        engine.add_request("alone", list(wish.prompt), wish.sampling, keep_logits=keep_logits)
        while engine.has_unfinished:
            fault = engine.step().record.fault
            check(fault is None, f"alone a request fails: {fault}, {wish}")
        output, logits = engine.release("alone")
        return Alone(output.outputs[0], output.prompt_logprobs, logits)

    def compare(
        self, wish: Wish, output: RequestOutput, logits: np.ndarray | None, seeds: Sequence[int]
    ) -> None:
        """Compare all that a request got.

        Args:
            wish: What it asked for.
            output: What it got.
            logits: Of its prompt.
            seeds: Of its completions; None in the wish means these.

        Raises:
            AssertionError: It got something else, and no close decision explains it.
        """
        completions = output.outputs
        check(len(completions) == wish.params.get("n", 1), f"{len(completions)} completions")
        for number, (completion, seed) in enumerate(zip(completions, seeds, strict=True)):
            own = wish.with_params(seed=seed)
            if number and "prompt_logprobs" in wish.params:
                own = own.with_params(prompt_logprobs=None)
            check_laws(
                wish.prompt,
                own.sampling,
                completion,
                tokenizer=self._tokenizer,
                eos=EOS,
                think_ids=self._think_ids,
            )
            alone = self.alone(own)
            same = self._compare_tokens(own, completion, alone.completion)
            self._compare_logprobs(completion.logprobs, alone.completion.logprobs, same)
            self._check_sum(completion)
            if number == 0 and output.prompt_logprobs is not None:
                whole = len(output.prompt_logprobs)
                self._compare_logprobs(output.prompt_logprobs, alone.prompt_logprobs, whole)
                check(whole == len(wish.prompt), f"{whole} prompt_logprobs")
        finished = any(one.finish_reason in ("stop", "length") for one in completions[:1])
        if finished and wish.params.get("prompt_logprobs") is not None:
            check(output.prompt_logprobs is not None, "no prompt_logprobs")
        if finished and wish.extra.get("keep_logits"):
            expected = self.alone(wish.with_params(seed=seeds[0])).logits
            gap = float(np.abs(np.asarray(logits) - np.asarray(expected)).max())
            check(gap < LOGITS, f"logits of the prompt differ by {gap:.1e}")
            self.seen["prompts with logits"] += 1

    def _compare_tokens(self, wish: Wish, got: CompletionOutput, alone: CompletionOutput) -> int:
        """Return how many tokens are those alone."""
        tokens, expected = got.token_ids, alone.token_ids
        same = next(
            (n for n, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1]),
            min(len(tokens), len(expected)),
        )
        self.seen["completions"] += 1
        if same < min(len(tokens), len(expected)):
            margin = self._margin(wish, expected[: same + 1])
            check(
                margin < TOLERANCE,
                f"{tokens} differ from {expected} at {same}, where the margin is {margin:.1e}",
            )
            self.seen["close decisions"] += 1
            return same
        if got.finish_reason in ("abort", "error"):
            check(len(tokens) <= len(expected), f"{tokens} go on after {expected}")
            return same
        for name in ("token_ids", "text", "finish_reason", "stop_reason"):
            one, other = getattr(got, name), getattr(alone, name)
            check(one == other, f"{name} is {one!r}, alone {other!r}")
        return same

    def _margin(self, wish: Wish, tokens: Sequence[int]) -> float:
        """Return how close the decision for the last of some tokens was."""
        params, prompt, output = wish.sampling, list(wish.prompt), list(tokens[:-1])
        raw = self._llm.logits([*prompt, *output])[-1]
        scores = controlled_logits(raw, params, prompt, output, think_ids=self._think_ids)
        ends = () if params.ignore_eos else (EOS,)
        banned = (*ends, *params.stop_token_ids) if len(output) < params.min_tokens else ()
        return decide(scores, params, position=len(prompt) + len(output), banned=banned).margin

    def _compare_logprobs(
        self,
        got: Sequence[PositionLogprobs | None] | None,
        alone: Sequence[PositionLogprobs | None] | None,
        count: int,
    ) -> None:
        """Compare the first ``count`` positions."""
        check((got is None) == (alone is None), f"log-probabilities {got}, alone {alone}")
        if got is None or alone is None:
            return
        check(len(got) >= count, f"{len(got)} positions of {count}")
        for one, other in zip(got[:count], alone[:count], strict=False):
            check((one is None) == (other is None), f"{one}, alone {other}")
            if one is not None and other is not None:
                self._compare_position(one, other)

    def _compare_position(self, got: PositionLogprobs, alone: PositionLogprobs) -> None:
        self.seen["positions with logprobs"] += 1
        check(next(iter(got)) == next(iter(alone)), f"of another token: {got}, alone {alone}")
        # Where two tokens are as likely up to rounding, either may be the last of the top ones.
        for one, other in zip(_values(got), _values(alone), strict=True):
            self._note(one, other, f"{got}, alone {alone}")
        for token in got.keys() & alone.keys():
            mine, own = got[token], alone[token]
            self._note(mine.logprob, own.logprob, f"{token}: {mine}, alone {own}")
            self.seen["ranks that differ"] += mine.rank != own.rank
            check(mine.decoded_token == own.decoded_token, f"{mine}, alone {own}")

    def _note(self, one: float, other: float, what: str) -> None:
        gap = 0.0 if one == other else abs(one - other)
        self.furthest = max(self.furthest, gap)
        check(gap <= LOGPROBS, f"log-probabilities differ by {gap:.1e}: {what}")

    def _check_sum(self, completion: CompletionOutput) -> None:
        if completion.logprobs is None:
            check(completion.cumulative_logprob is None, "a sum without log-probabilities")
            return
        check(len(completion.logprobs) == len(completion.token_ids), "logprobs of other tokens")
        own = zip(completion.token_ids, completion.logprobs, strict=True)
        total = sum(position[token].logprob for token, position in own)
        gap = abs(total - (completion.cumulative_logprob or 0.0))
        check(gap < 1e-3, f"the sum of log-probabilities is off by {gap:.1e}")


def _values(position: PositionLogprobs) -> list[float]:
    return sorted(one.logprob for one in position.values())
