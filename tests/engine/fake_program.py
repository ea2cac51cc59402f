"""A stand-in for the step programs: no JAX, tokens from a hash, and a device that checks itself.

It reads the packed arrays alone, as a device would, and keeps its own slots and paged cache. The
next token is a hash of the request's settings and of the token ids read back through the page
table, so that a wrong page, position, reset or stale page shows up as a wrong token. What a device
would do silently (write page 0, read a stale entry, write an entry twice) fails here at once.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from engine.fake_controls import FREE, FakeControls, Rule, rule_alone, walk

from bucketing.grid import Cell
from bucketing.step_inputs import NO_STOP_ID, Limits, StepInputs, StepOutputs, neutral_inputs
from glm_jax.sampling.params import SamplingParams

VOCABULARY = 97
# Never a token: what an entry holds until somebody who owns it writes it.
STALE = -1


# What a later pass of the drafter leaves behind a request's rows.
AHEAD = -2


class Settings(NamedTuple):
    """What a slot was told; all of it goes into the hash."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: tuple[int, int]
    min_length: int
    stop_ids: tuple[int, ...]


def draw(history: Sequence[int], settings: Settings, rule: Rule = FREE) -> int:
    """Return the next token after `history`: the first one of a hashed walk that is allowed."""
    mixed = hash((tuple(history), *settings[:4], settings.seed))
    token = mixed % VOCABULARY
    banned = settings.stop_ids if len(history) < settings.min_length else ()
    return walk(token, VOCABULARY, frozenset(banned), rule) if banned or rule != FREE else token


def tokens_alone(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    eos: Sequence[int],
    max_model_len: int,
    think: tuple[int, int] | None = None,
) -> list[int]:
    """Return a request's output as the rules say, without engine, pages or slots."""
    enders = (() if params.ignore_eos else tuple(eos)) + tuple(params.stop_token_ids)
    floor = len(prompt) + params.min_tokens if params.min_tokens else 0
    settings = Settings(
        *(np.float32(params.temperature).item(), max(params.top_k, 0)),
        *(np.float32(params.top_p).item(), np.float32(params.min_p).item()),
        seed=(seed & 0xFFFFFFFF, seed >> 32),
        min_length=floor,
        stop_ids=tuple(dict.fromkeys(enders)) if floor else (),
    )
    known = list(prompt)
    most = min(len(prompt) + (params.max_tokens or max_model_len), max_model_len)
    while len(known) < most:
        rule = rule_alone(known, len(prompt), params, VOCABULARY, think)
        token = draw(known, settings, rule)
        known.append(token)
        if token in enders and len(known) >= floor:
            break
    return known[len(prompt) :]


def hidden_of(position: int, token: int) -> int:
    """What a row's hidden value says of it."""
    return position * VOCABULARY + token


def guess(history: Sequence[int], settings: Settings) -> int:
    """Return a draft of the token after `history`: three of four are right."""
    token = draw(history, settings)
    return token if hash((tuple(history), 4711)) % 4 else (token + 1) % VOCABULARY


class Rows(NamedTuple):
    """The rows of one request in a step; the last `drafts` of its tokens are drafts."""

    slot: int
    tokens: list[int]
    following: list[int]
    sampled: bool
    drafts: int
    new_drafts: int


@lru_cache(maxsize=4096)
def _neutral_lists(cell: Cell, limits: Limits) -> tuple[StepInputs, StepInputs]:
    """The neutral inputs, which are read-only, and the same as lists (made once, they are slow)."""
    neutral = neutral_inputs(cell, limits, 1)
    return neutral, StepInputs(*(array[0].tolist() for array in neutral))


class FakeDevice:
    """The slots and the cache of one rank, and the step that every cell's program runs on them.

    Attributes:
        tokens: Token id per entry (page * page_size + offset), STALE until written. All state is
            Python lists: at test sizes they are several times faster than arrays.
        following: The token after it, as the inputs or a draw told.
        drafter: The same in the cache of the drafter's layer, which has only the rows of steps in
            which it ran.
        written: Entries that the last step wrote.
        ahead: Entries that its drafter wrote behind the rows.
        last_rows: In a decode loop, the rows of each slot beyond which nothing is written.
        steps: Steps run.
    """

    def __init__(self, limits: Limits, num_pages: int, *, writes_ahead: bool = False) -> None:
        """Make a zeroed device; the last slot is the pad slot."""
        self.limits = limits
        self.writes_ahead = writes_ahead
        self.tokens = [STALE] * (num_pages * limits.page_size)
        self.following = [STALE] * (num_pages * limits.page_size)
        self.drafter = [STALE] * (num_pages * limits.page_size)
        slots = limits.max_num_seqs + 1
        self.page_table = [[0] * limits.pages_per_seq for _ in range(slots)]
        self.computed = [0] * slots
        self.last_token = [STALE] * slots
        self.drafts = [[STALE] * limits.num_drafts for _ in range(slots)]
        self.settings: list[Settings | None] = [None] * slots
        self.controls = FakeControls(limits, VOCABULARY)
        self.written: list[int] = []
        self.ahead: list[int] = []
        self.last_rows: dict[int, int] = {}
        self.steps = 0

    def keep_only(self, owners: Sequence[tuple[Sequence[int], int]]) -> None:
        """Make every entry stale but the first `computed` of each (pages, computed) owner.

        Free pages, pages that change hands and the tails of pages thus never hold a token that a
        later owner could read without writing it first.
        """
        for name in ("tokens", "following", "drafter"):
            old = getattr(self, name)
            kept = [STALE] * len(old)
            for pages, computed in owners:
                for entry in self._entries(pages, computed):
                    kept[entry] = old[entry]
            setattr(self, name, kept)

    def _entries(self, pages: Sequence[int], length: int) -> list[int]:
        """Return the entries of the first `length` positions of a page table."""
        size = self.limits.page_size
        used = pages[: -(-length // size)]
        return [page * size + offset for page in used for offset in range(size)][:length]

    def program(self, cell: Cell) -> Callable[[StepInputs], StepOutputs]:
        """Return the program of a cell."""
        return lambda inputs: self.run(cell, inputs)

    def run(self, cell: Cell, inputs: StepInputs) -> StepOutputs:
        """Run one step: resets, page updates, all writes, then reads and draws."""
        self.steps += 1
        self.written, self.ahead = [], []
        host = self._read(cell, inputs)
        self._update_slots(host)
        chunks, groups = self._chunks(host), self._groups(host)
        served = [rows.slot for rows in (*chunks, *groups) if rows.slot != self.limits.pad_slot]
        assert len(served) == len(set(served)), f"a slot is served twice: {served}"
        for rows in (*chunks, *groups):
            self._write(rows)
        assert len(self.written) == len(set(self.written)), "an entry is written twice"
        hidden = self._hidden(cell, host, chunks, groups)
        # Results land where the contract says; everything else is garbage, and must be ignored.
        chunk_tokens = np.full((1, self.limits.chunks(cell)), -7, np.int32)
        group_tokens = np.full((1, cell.groups, cell.width), -7, np.int32)
        accepted = np.full((1, cell.groups), -7, np.int32)
        requests = len(chunks) + len(groups)
        drafts = np.full((1, requests, self.limits.num_drafts), -7, np.int32)
        for number, rows in enumerate((*chunks, *groups)):
            if rows.slot == self.limits.pad_slot:
                continue
            drawn = self._advance(rows, drafter=host.drafter)
            new = self._draft(rows) if rows.new_drafts else []
            drafts[0, number, : len(new)] = new
            if number < len(chunks):
                chunk_tokens[0, number] = drawn[0] if drawn else -7
                continue
            first, group = len(rows.tokens) - rows.drafts - 1, number - len(chunks)
            group_tokens[0, group, first : first + len(drawn)] = drawn
            accepted[0, group] = max(0, len(drawn) - 1)
        self._check_pads()
        # One layer of one expert, which every row reaches.
        count = sum(len(rows.tokens) for rows in (*chunks, *groups))
        load, counts = np.full((1, 2), count, np.float32), np.full((1, 1, 1), count, np.int32)
        return StepOutputs(chunk_tokens, group_tokens, accepted, drafts, load, counts, hidden)

    def _hidden(
        self, cell: Cell, host: StepInputs, chunks: Sequence[Rows], groups: Sequence[Rows]
    ) -> np.ndarray:
        """A hidden row of one value: the position and the token of the row; garbage in pads."""
        hidden = np.full((1, cell.rows, 1), np.nan, np.float32)
        places = (cell.prefill + group * cell.width for group in range(cell.groups))
        for first, rows in zip((*host.chunk_start[:-1], *places), (*chunks, *groups), strict=True):
            for n, token in enumerate(rows.tokens):
                hidden[0, first + n, 0] = hidden_of(self.computed[rows.slot] + n, token)
        return hidden

    def _read(self, cell: Cell, inputs: StepInputs) -> StepInputs:
        """Return the inputs as lists, after checking their shapes and dtypes."""
        neutral, fetched = _neutral_lists(cell, self.limits)
        lists = []
        for array, pad, pad_list in zip(inputs, neutral, fetched, strict=True):
            if array is not pad:
                assert (array.shape, array.dtype) == (pad.shape, pad.dtype)
                pad_list = array[0].tolist()
            lists.append(pad_list)
        return StepInputs(*lists)

    def _update_slots(self, host: StepInputs) -> None:
        dropped = self.limits.dropped_slot
        for z, slot in enumerate(host.reset_slot):
            if slot == dropped:
                assert not any(host.reset_pages[z])
                continue
            assert 0 <= slot < self.limits.max_num_seqs, f"reset of slot {slot}"
            self.page_table[slot] = list(host.reset_pages[z])
            self.computed[slot] = host.reset_computed[z]
            self.last_token[slot] = STALE
            self.drafts[slot] = [STALE] * self.limits.num_drafts
            self.settings[slot] = Settings(
                host.reset_temperature[z],
                host.reset_top_k[z],
                host.reset_top_p[z],
                host.reset_min_p[z],
                tuple(host.reset_seed[z]),
                host.reset_min_length[z],
                tuple(token for token in host.reset_stop_ids[z] if token != NO_STOP_ID),
            )
        for slot, index, page in zip(host.page_slot, host.page_index, host.page_value, strict=True):
            if slot == dropped:
                assert (index, page) == (0, 0)
                continue
            assert 0 <= slot < self.limits.max_num_seqs, f"page update of slot {slot}"
            assert self.page_table[slot][index] == 0, "a page-table entry is replaced"
            assert page > 0, "a slot gains page 0"
            self.page_table[slot][index] = page

    def _chunks(self, host: StepInputs) -> list[Rows]:
        chunks = []
        assert host.chunk_start[0] == 0
        for j, slot in enumerate(host.chunk_slot):
            at = slice(host.chunk_start[j], host.chunk_start[j + 1])
            tokens, following = host.prefill_tokens[at], host.prefill_next[at]
            sampled, new_drafts = host.chunk_sampled[j], host.chunk_new_drafts[j]
            assert bool(tokens) == (slot != self.limits.pad_slot), f"chunk {j} of slot {slot}"
            self._check_drafting(host, sampled, new_drafts)
            chunks.append(Rows(slot, tokens, following, sampled, 0, new_drafts))
            assert slot != self.limits.pad_slot or not host.chunk_sampled[j]
        assert not any(host.prefill_tokens[host.chunk_start[-1] :]), "pad rows hold tokens"
        assert not any(host.prefill_next[host.chunk_start[-1] :])
        return chunks

    def _groups(self, host: StepInputs) -> list[Rows]:
        groups = []
        for g, slot in enumerate(host.group_slot):
            known, decodes, drafts = (
                host.group_known[g],
                host.group_decodes[g],
                host.group_drafts[g],
            )
            sampled, new_drafts = host.group_sampled[g], host.group_new_drafts[g]
            self._check_drafting(host, sampled, new_drafts)
            if slot == self.limits.pad_slot:
                assert (known, decodes, drafts, sampled) == (0, False, 0, False)
                assert not any(host.group_tokens[g] + host.group_next[g])
                groups.append(Rows(slot, [], [], False, 0, 0))
                continue
            assert known >= 1
            assert not any(host.group_tokens[g][known:])
            if decodes:
                assert known == 1
                assert sampled
                tokens = [self.last_token[slot], *self.drafts[slot][:drafts]]
                assert min(tokens) >= 0, "a draft is verified that nobody made"
                following = [*tokens[1:], 0]
            else:
                assert drafts == 0
                tokens, following = host.group_tokens[g][:known], host.group_next[g][:known]
            groups.append(Rows(slot, tokens, following, sampled, drafts, new_drafts))
        return groups

    def _check_drafting(self, host: StepInputs, sampled: bool, new_drafts: int) -> None:
        assert 0 <= new_drafts <= self.limits.num_drafts
        assert not new_drafts or (host.drafter and sampled), "drafts behind nothing"

    def _write(self, rows: Rows) -> None:
        for n, (token, after) in enumerate(zip(rows.tokens, rows.following, strict=True)):
            entry = self._entry(rows.slot, self.computed[rows.slot] + n)
            assert token >= 0, f"slot {rows.slot} computes a token that nobody knows"
            self.tokens[entry] = token
            self.following[entry] = after
            self.written.append(entry)

    def _entry(self, slot: int, position: int) -> int:
        page_index, offset = divmod(position, self.limits.page_size)
        page = self.page_table[slot][page_index]
        assert page > 0, f"slot {slot} writes page 0"
        return page * self.limits.page_size + offset

    def _advance(self, rows: Rows, *, drafter: bool) -> list[int]:
        """Advance a slot; when sampled, draw behind its last known token and behind each draft.

        Returns the tokens up to the first that is not the draft at its place.
        """
        slot, known = rows.slot, len(rows.tokens) - rows.drafts
        start = self.computed[slot]
        self.computed[slot] += known
        drawn: list[int] = []
        if rows.sampled:
            assert rows.following[-1] == 0, "the token after a sampled row cannot be known"
            drafts = rows.tokens[known:]
            drawn.append(self._draw(slot, 0))
            while len(drawn) <= len(drafts) and drawn[-1] == drafts[len(drawn) - 1]:
                self.computed[slot] += 1
                drawn.append(self._draw(slot, len(drawn)))
            self.last_token[slot] = drawn[-1]
        # The drafter's layer gets the token just drawn as the row's next one.
        for position in range(start, start + len(rows.tokens)):
            entry = self._entry(slot, position)
            self.drafter[entry] = self.following[entry] if drafter else STALE
        return drawn

    def _draw(self, slot: int, drafts: int) -> int:
        """Read a slot's whole history back and draw the next token; its end is so many drafts."""
        history = self._history(slot)
        entries = self._entries(self.page_table[slot], self.computed[slot])
        following = [self.following[entry] for entry in entries]
        size = self.limits.page_size
        for position, (told, token) in enumerate(zip(following, history[1:], strict=False), 1):
            # A page found in the prefix cache may have been followed by another token there; only
            # a drafter would mind, and then it is not found.
            other = position % size == 0 and not self.limits.num_drafts
            assert told == token or other, f"slot {slot} has wrong next tokens"
        rule = self.controls.rule(slot, history, drafts)
        token = draw(history, self._settings(slot), rule)
        self.following[entries[-1]] = token
        return token

    def _draft(self, rows: Rows) -> list[int]:
        """Draft behind the last token drawn; the drafter must have seen all that was computed."""
        slot = rows.slot
        tokens = [*self._history(slot), self.last_token[slot]]
        entries = self._entries(self.page_table[slot], self.computed[slot])
        seen = [self.drafter[entry] for entry in entries]
        assert seen == tokens[1:], f"the drafter's cache of slot {slot} is wrong"
        new = []
        for _ in range(rows.new_drafts):
            new.append(guess([*tokens, *new], self._settings(slot)))
        self.drafts[slot] = new + [STALE] * (self.limits.num_drafts - len(new))
        if self.writes_ahead:
            stop = self.computed[slot] + len(new) - 1
            for position in range(self.computed[slot], min(stop, self.last_rows.get(slot, stop))):
                entry = self._entry(slot, position)
                self.drafter[entry] = AHEAD
                self.ahead.append(entry)
        return new

    def _history(self, slot: int) -> list[int]:
        entries = self._entries(self.page_table[slot], self.computed[slot])
        history = [self.tokens[entry] for entry in entries]
        assert min(history) >= 0, f"slot {slot} reads a stale entry"
        return history

    def _settings(self, slot: int) -> Settings:
        settings = self.settings[slot]
        assert settings is not None, f"slot {slot} was never reset"
        return settings

    def _check_pads(self) -> None:
        assert set(self.tokens[: self.limits.page_size]) == {STALE}, "page 0 was written"
        assert not any(self.page_table[-1]), "the pad slot has pages"
        assert self.computed[-1] == 0
