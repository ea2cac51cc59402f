"""One request: its tokens, where it stands, and what the scheduler holds for it. Host-only."""

from collections.abc import Iterable, Sequence
from enum import StrEnum

import numpy as np
from jaxtyping import Int32

from bucketing.pack import SlotSettings
from glm_jax.engine.acceptance import RequestAcceptance
from glm_jax.engine.page_keys import PageKeys
from glm_jax.sampling.params import SamplingParams
from glm_jax.sampling.request_controls import RequestControls


class RowClass(StrEnum):
    """What a request's rows are, decided by its state and never by a shape."""

    PREFILL = "prefill"
    DECODE = "decode"


class RequestStatus(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    PREEMPTED = "preempted"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Request:
    """A prompt, the tokens it grew, and its bookkeeping.

    T = `length` tokens are known; the first `computed` of them are in the cache. While `computed <
    prefill_end` it is in class PREFILL; after that in class DECODE, with computed = T - 1.

    Only the scheduler changes the attributes below.

    Attributes:
        request_id: Unique among unfinished requests.
        params: What the user asked for.
        eos_token_ids: The model's end tokens.
        prompt_length: Tokens of the prompt.
        length: T, tokens known.
        max_length: T at which it ends for length; set at submit.
        seed: 64-bit seed; set at submit.
        status: Where it is.
        computed: Tokens whose rows are in the cache.
        prefill_end: T when it was (re)admitted: what must be computed before it decodes.
        draft_token_ids: Drafts that wait on the device for verification.
        speculates: Whether drafts are made for it at all; the draft policy decides when it gets its
            slot, and may end it later.
        acceptance: What became of its drafts.
        slot: Its slot while running; None otherwise.
        pages: Its page table while running.
        synced_pages: How many entries of it the device knows.
        needs_reset: Whether the device must still be told that it took over the slot.
        preemptions: How often it lost its pages.
        priority: Lower is served first, where the scheduling policy is "priority".
        arrival: Its turn among all requests; set at submit.
        deadline: Time after which it is ended, by the engine's clock; None is never.
        overtaken: How often a later request was admitted before it.
        cache_salt: It shares pages only with requests of the same salt.
        reads_prefix: Whether it may begin with cached pages; not where every row is wanted.
        page_keys: Names the content of its pages; made when first needed.
        found: Cached pages that it begins with, while it waits: (losses of the pool then, whether
            complete ones were asked for, pages). None where it was not looked up.
        published: How many of its pages others can find.
        num_cached_tokens: Tokens found in the prefix cache when it was first admitted; None before.
        controls: How its logits are changed beyond what its slot says; None is not at all.
        finish_reason: Set when it is finished.
        stop_value: The token id or string that ended it; None for EOS and other reasons.
        error: Why it failed, with finish reason ERROR.
    """

    __slots__ = (
        "_tokens",
        "acceptance",
        "arrival",
        "cache_salt",
        "computed",
        "controls",
        "deadline",
        "draft_token_ids",
        "eos_token_ids",
        "error",
        "finish_reason",
        "found",
        "length",
        "max_length",
        "needs_reset",
        "num_cached_tokens",
        "overtaken",
        "page_keys",
        "pages",
        "params",
        "preemptions",
        "prefill_end",
        "priority",
        "prompt_length",
        "published",
        "reads_prefix",
        "request_id",
        "seed",
        "slot",
        "speculates",
        "status",
        "stop_value",
        "synced_pages",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: Iterable[int] = (),
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Copy the prompt's token ids."""
        self.request_id = request_id
        self.params = params
        self.eos_token_ids = tuple(eos_token_ids)
        self._tokens = np.array(prompt, np.int32).reshape(-1)
        self.prompt_length = self.length = len(self._tokens)
        self.max_length = 0
        self.seed = 0
        self.status = RequestStatus.WAITING
        self.computed = 0
        self.prefill_end = self.length
        self.draft_token_ids: Sequence[int] = ()
        self.speculates = False
        self.acceptance = RequestAcceptance()
        self.slot: int | None = None
        self.pages: list[int] = []
        self.synced_pages = 0
        self.needs_reset = False
        self.preemptions = 0
        self.priority = priority
        self.arrival = 0
        self.deadline = deadline
        self.overtaken = 0
        self.cache_salt = cache_salt
        self.reads_prefix = True
        self.page_keys: PageKeys | None = None
        self.found: tuple[int, bool, list[int]] | None = None
        self.published = 0
        self.num_cached_tokens: int | None = None
        self.controls: RequestControls | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_value: int | str | None = None
        self.error: str | None = None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status}, {self.computed}/{self.length} computed, "
            f"prompt {self.prompt_length})"
        )

    @property
    def decoding(self) -> bool:
        """Whether its next rows are of class DECODE."""
        return self.computed >= self.prefill_end

    @property
    def row_class(self) -> RowClass:
        """The class of its next rows."""
        return RowClass.DECODE if self.decoding else RowClass.PREFILL

    @property
    def finished(self) -> bool:
        """Whether it ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    @property
    def num_output_tokens(self) -> int:
        """How many tokens it generated."""
        return self.length - self.prompt_length

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        return self._tokens[: self.prompt_length].tolist()

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self._tokens[self.prompt_length : self.length].tolist()

    @property
    def most_rows(self) -> int:
        """The most rows it can ever have in the cache: its very last token is never computed."""
        return self.max_length - 1

    @property
    def admission_rows(self) -> int:
        """Rows that must fit before it is admitted: all known tokens and one step of decode."""
        return min(self.length + 1, self.most_rows)

    @property
    def tokens(self) -> Int32[np.ndarray, " T"]:
        """All known tokens, prompt and output; not to be written."""
        return self._tokens[: self.length]

    def token(self, index: int) -> int:
        """Return one known token."""
        return int(self._tokens[index])

    def append(self, token: int) -> None:
        """Add a generated token."""
        if self.length == len(self._tokens):
            # Doubling: appending stays cheap, and a long prompt does not reserve its whole future.
            grown = np.zeros(max(16, 2 * self.length), np.int32)
            grown[: self.length] = self._tokens
            self._tokens = grown
        self._tokens[self.length] = token
        self.length += 1

    def rows(self, count: int) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
        """Return the next `count` uncomputed tokens and the token after each (0 where unknown)."""
        start, stop = self.computed, self.computed + count
        tokens = self._tokens[start:stop]
        if stop < self.length:
            return tokens, self._tokens[start + 1 : stop + 1]
        following = np.zeros(count, np.int32)
        following[:-1] = tokens[1:]
        return tokens, following

    def settings(self) -> SlotSettings:
        """Return how its slot samples."""
        params = self.params
        stop_ids = self.banned_ids() if params.min_tokens else ()
        return SlotSettings(
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            seed=self.seed,
            min_length=self.prompt_length + params.min_tokens if params.min_tokens else 0,
            stop_ids=stop_ids,
        )

    def banned_ids(self) -> tuple[int, ...]:
        """Return the ids that end it, and so may not be drawn before min_tokens."""
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*eos, *self.params.stop_token_ids)))
