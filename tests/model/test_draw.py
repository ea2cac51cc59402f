"""The tokens drawn behind accepted and refused drafts have the distribution of the target.

20,000 fixed seeds go through the verification of a step: a chi-square test against frequencies in
NumPy, from the reference logits of transformers.
"""

import functools
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bucketing.cell import Cell
from bucketing.pack import Group, RankRows, pack
from bucketing.step_inputs import Limits
from glm_jax.model.draw import draw_tokens
from glm_jax.model.rows import build_rows
from glm_jax.model.slots import empty_slots

REFERENCE = Path(__file__).resolve().parents[1] / "golden" / "tiny" / "reference.npz"
SEEDS, GROUPS, DRAFTS = 20_000, 2_000, 2
CELL = Cell(0, GROUPS, DRAFTS + 1)
LIMITS = Limits(max_num_seqs=GROUPS, pages_per_seq=2, page_size=8, num_drafts=DRAFTS)
TEMPERATURE, TOP_K, TOP_P = 0.8, 6, 0.9
# Of the chi-square distribution with 14 degrees of freedom: 0.999 of it is below.
CRITICAL = 36.123


@functools.cache
def logits() -> np.ndarray:
    """Of the rows of a group; five, six and six tokens are kept."""
    with np.load(REFERENCE) as reference:
        return reference["logits"][[20, 33, 47]]


def probabilities(row: np.ndarray, temperature: float = TEMPERATURE) -> dict[int, float]:
    """The kept tokens' softmax after temperature, top-k and top-p, in that order."""
    weights = np.exp((row - row.max()).astype(np.float64) / temperature)
    kept = np.argsort(-weights, kind="stable")[:TOP_K]
    share = weights[kept] / weights[kept].sum()
    kept = kept[np.cumsum(share) - share < TOP_P]
    return dict(zip(kept.tolist(), weights[kept] / weights[kept].sum(), strict=True))


def drafts() -> list[int]:
    """The most probable token of the first row, the second of the second."""
    first, second = (list(probabilities(row)) for row in logits()[:DRAFTS])
    return [first[0], second[1]]


def expected_frequencies(temperature: float = TEMPERATURE) -> dict[tuple[int, ...], float]:
    """How often each sequence is emitted: accepted drafts, then the token that ends it."""
    found, reached = {}, float(SEEDS)
    for place, row in enumerate(logits()):
        shares = probabilities(row, temperature)
        before = drafts()[:place]
        accepted = drafts()[place] if place < DRAFTS else None
        for token, share in shares.items():
            if token != accepted:
                found[*before, token] = reached * share
        reached *= shares.get(accepted, 0.0)
    return found


@functools.cache
def emitted() -> Counter[tuple[int, ...]]:
    """What the program emits for every seed."""
    rows, vocab_size = logits(), logits().shape[1]

    @jax.jit
    def verify(slots, inputs):
        slots, inputs = jax.tree.map(lambda array: array[0], (slots, inputs))
        place = build_rows(slots, inputs, page_size=8, pool_entries=24, tile_rows=1)
        hidden = jnp.tile(jnp.asarray(rows), (GROUPS, 1))
        return draw_tokens(jnp.eye(vocab_size), hidden, slots, place, inputs)[1]

    groups = [Group(slot, True, 1, DRAFTS, None, None, True) for slot in range(GROUPS)]
    inputs = pack(CELL, LIMITS, [RankRows(groups=groups)])
    slots = empty_slots(LIMITS, 1)
    slots.page_table[:, :GROUPS] = [1, 2]
    slots.computed[:, :GROUPS] = 5
    slots.drafts[:, :GROUPS] = drafts()
    slots.temperature[:], slots.top_k[:], slots.top_p[:] = TEMPERATURE, TOP_K, TOP_P
    found: Counter[tuple[int, ...]] = Counter()
    for start in range(0, SEEDS, GROUPS):
        slots.seed[0, :GROUPS, 0] = np.arange(start, start + GROUPS)
        drawn = verify(slots, inputs)
        tokens, accepted = np.asarray(drawn.group_tokens), np.asarray(drawn.group_accepted)
        for line, count in zip(tokens.tolist(), accepted.tolist(), strict=True):
            found[tuple(line[: count + 1])] += 1
    return found


def chi_square(expected: dict[tuple[int, ...], float]) -> float:
    found = emitted()
    return sum((found[key] - count) ** 2 / count for key, count in expected.items())


def test_20000_seeds_emit_behind_drafts_what_the_target_would():
    expected = expected_frequencies()
    assert len(expected) == 4 + 5 + 6
    assert abs(sum(expected.values()) - SEEDS) < 1e-6
    assert min(expected.values()) > 100
    assert emitted().keys() == expected.keys()
    assert chi_square(expected) < CRITICAL


def test_the_chi_square_test_notices_another_temperature():
    assert chi_square(expected_frequencies(1.2 * TEMPERATURE)) > CRITICAL
