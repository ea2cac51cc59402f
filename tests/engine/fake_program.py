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

from bucketing.grid import Cell
from bucketing.step_inputs import NO_STOP_ID, Limits, StepInputs, StepOutputs, neutral_inputs
from glm_jax.sampling.params import SamplingParams

VOCABULARY = 97
# Never a token: what an entry holds until somebody who owns it writes it.
STALE = -1


class Settings(NamedTuple):
    """What a slot was told; all of it goes into the hash."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: tuple[int, int]
    min_length: int
    stop_ids: tuple[int, ...]


def draw(history: Sequence[int], settings: Settings) -> int:
    """Return the next token after `history`: the first one of a hashed walk that is allowed."""
    mixed = hash((tuple(history), *settings[:4], settings.seed))
    token = mixed % VOCABULARY
    banned = settings.stop_ids if len(history) < settings.min_length else ()
    while token in banned:
        token = (token + 1) % VOCABULARY
    return token


def tokens_alone(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    eos: Sequence[int],
    max_model_len: int,
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
        token = draw(known, settings)
        known.append(token)
        if token in enders and len(known) >= floor:
            break
    return known[len(prompt) :]


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
        following: The token after it, as the drafter's layer was told.
        written: Entries that the last step wrote.
        steps: Steps run.
    """

    def __init__(self, limits: Limits, num_pages: int) -> None:
        """Make a zeroed device; the last slot is the pad slot."""
        self.limits = limits
        self.tokens = [STALE] * (num_pages * limits.page_size)
        self.following = [STALE] * (num_pages * limits.page_size)
        slots = limits.max_num_seqs + 1
        self.page_table = [[0] * limits.pages_per_seq for _ in range(slots)]
        self.computed = [0] * slots
        self.last_token = [STALE] * slots
        self.settings: list[Settings | None] = [None] * slots
        self.written: list[int] = []
        self.steps = 0

    def keep_only(self, owners: Sequence[tuple[Sequence[int], int]]) -> None:
        """Make every entry stale but the first `computed` of each (pages, computed) owner.

        Free pages, pages that change hands and the tails of pages thus never hold a token that a
        later owner could read without writing it first.
        """
        for name in ("tokens", "following"):
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
        self.written = []
        host = self._read(cell, inputs)
        self._update_slots(host)
        chunks, groups = self._chunks(host), self._groups(host)
        served = [slot for slot, *_ in (*chunks, *groups) if slot != self.limits.pad_slot]
        assert len(served) == len(set(served)), f"a slot is served twice: {served}"
        for slot, tokens, following, _ in (*chunks, *groups):
            self._write(slot, tokens, following)
        assert len(self.written) == len(set(self.written)), "an entry is written twice"
        # Results land where the contract says; everything else is garbage, and must be ignored.
        chunk_tokens = np.full((1, self.limits.chunks(cell)), -7, np.int32)
        group_tokens = np.full((1, cell.groups, cell.width), -7, np.int32)
        accepted = np.full((1, cell.groups), -7, np.int32)
        for j, (slot, tokens, following, sampled) in enumerate(chunks):
            if slot != self.limits.pad_slot:
                drawn = self._advance(slot, len(tokens), following[-1], sampled)
                chunk_tokens[0, j] = drawn if sampled else -7
        for g, (slot, tokens, following, sampled) in enumerate(groups):
            if slot != self.limits.pad_slot:
                drawn = self._advance(slot, len(tokens), following[-1], sampled)
                group_tokens[0, g, len(tokens) - 1] = drawn if sampled else -7
                accepted[0, g] = 0
        self._check_pads()
        hidden = np.zeros((1, cell.rows, 1), np.float32)
        drafts = np.zeros((1, len(chunks) + len(groups), 0), np.int32)
        # One layer of one expert, which every row reaches.
        rows = sum(len(tokens) for slot, tokens, *_ in (*chunks, *groups) if slot in served)
        load, counts = np.full((1, 2), rows, np.float32), np.full((1, 1, 1), rows, np.int32)
        return StepOutputs(chunk_tokens, group_tokens, accepted, drafts, load, counts, hidden)

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

    def _chunks(self, host: StepInputs) -> list[tuple[int, list[int], list[int], bool]]:
        chunks = []
        assert host.chunk_start[0] == 0
        for j, slot in enumerate(host.chunk_slot):
            rows = slice(host.chunk_start[j], host.chunk_start[j + 1])
            tokens, following = host.prefill_tokens[rows], host.prefill_next[rows]
            assert bool(tokens) == (slot != self.limits.pad_slot), f"chunk {j} of slot {slot}"
            chunks.append((slot, tokens, following, host.chunk_sampled[j]))
            assert slot != self.limits.pad_slot or not host.chunk_sampled[j]
        assert not any(host.prefill_tokens[host.chunk_start[-1] :]), "pad rows hold tokens"
        assert not any(host.prefill_next[host.chunk_start[-1] :])
        return chunks

    def _groups(self, host: StepInputs) -> list[tuple[int, list[int], list[int], bool]]:
        groups = []
        for g, slot in enumerate(host.group_slot):
            known, decodes = host.group_known[g], host.group_decodes[g]
            if slot == self.limits.pad_slot:
                assert (known, decodes, host.group_drafts[g]) == (0, False, 0)
                assert not host.group_sampled[g]
                assert not any(host.group_tokens[g] + host.group_next[g])
                groups.append((slot, [], [], False))
                continue
            assert known >= 1
            assert host.group_drafts[g] == 0, "this device never drafts"
            assert not any(host.group_tokens[g][known:])
            if decodes:
                assert known == 1
                assert host.group_sampled[g]
                tokens, following = [self.last_token[slot]], [0]
            else:
                tokens, following = host.group_tokens[g][:known], host.group_next[g][:known]
            groups.append((slot, tokens, following, host.group_sampled[g]))
        return groups

    def _write(self, slot: int, tokens: list[int], following: list[int]) -> None:
        for n, (token, after) in enumerate(zip(tokens, following, strict=True)):
            page_index, offset = divmod(self.computed[slot] + n, self.limits.page_size)
            page = self.page_table[slot][page_index]
            assert page > 0, f"slot {slot} writes page 0"
            assert token >= 0, f"slot {slot} computes a token that nobody knows"
            entry = page * self.limits.page_size + offset
            self.tokens[entry] = token
            self.following[entry] = after
            self.written.append(entry)

    def _advance(self, slot: int, rows: int, last_following: int, sampled: bool) -> int:
        """Advance a slot; when sampled, read its whole history back and draw the next token."""
        self.computed[slot] += rows
        length = self.computed[slot]
        if not sampled:
            return STALE
        assert last_following == 0, "the token after a sampled row cannot be known"
        entries = self._entries(self.page_table[slot], length)
        history = [self.tokens[entry] for entry in entries]
        following = [self.following[entry] for entry in entries]
        assert min(history) >= 0, f"slot {slot} reads a stale entry"
        assert following[:-1] == history[1:], f"slot {slot} has wrong next tokens"
        settings = self.settings[slot]
        assert settings is not None, f"slot {slot} was never reset"
        self.last_token[slot] = draw(history, settings)
        # The drafter's layer gets the token just drawn as the row's next one.
        self.following[entries[-1]] = self.last_token[slot]
        return self.last_token[slot]

    def _check_pads(self) -> None:
        assert set(self.tokens[: self.limits.page_size]) == {STALE}, "page 0 was written"
        assert not any(self.page_table[-1]), "the pad slot has pages"
        assert self.computed[-1] == 0
