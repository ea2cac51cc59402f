"""Floors of GLM-5.3 on 8 H200 that were worked out without this code, operator by operator.

Where that calculation is coarser, the difference is spelt out here: it counts one byte for the
weights of the index heads (they are bfloat16), 2 % for scales on rows sent either way (the ledger
32 bits per 128 values, one way), ranks of a row as if its 8 experts were drawn with repetition
(5.25 of 8; they are distinct: 5.29), P^2 / 2 for the P (P + 1) / 2 pairs of a chunk's first rows,
no first pass of the MTP layer and no router, and the head's bytes alone.
"""

from typing import NamedTuple

import pytest

from glm_jax.ledger.formats import make_formats
from glm_jax.ledger.hardware import HARDWARE
from glm_jax.ledger.layout import Layout
from glm_jax.ledger.ledger import DENSE, FULL, LATER_PASS, LAYER, SPARSE, STEP, make_ledger
from glm_jax.ledger.shape import ChunkShape, GroupShape, StepShape
from glm_jax.ledger.work import Method
from glm_jax.model.presets import PRESETS

GLM = PRESETS["glm-5.3"]
HIDDEN, INDEX_HEAD_WEIGHTS = 6144, 6144 * 32
SCALED = 1 + 4 / 128  # bytes of an e4m3 value with its share of a scale
RANKS_WITH_REPETITION = 8 * (1 - (7 / 8) ** 8)
CONTEXT = 131072


class Case(NamedTuple):
    prefill: int
    prefix: int
    requests: int
    drafts: int
    split: bool
    method: Method = Method()


CASES = (
    Case(0, 0, 32, 5, False),
    Case(0, 0, 32, 5, False, Method(shares_keys=False)),
    Case(8192, 0, 0, 5, False),
    Case(8192, 0, 0, 5, True),
    Case(8192, 0, 32, 5, False),
    Case(8192, 0, 32, 5, True),
    Case(8192, 0, 32, 5, True, Method(fused_topk=True)),
    Case(8192, 122880, 32, 5, True),
    Case(2048, 0, 32, 5, True),
    Case(512, 0, 32, 5, True),
    Case(0, 0, 32, 0, False),
)

# Microseconds of one layer, by case.
ATTAINABLE = """
projections: 38.377 38.377 1711.2 213.9 1716.2 218.91 218.91 218.91 58.488 38.377 38.377
indexer projections: 2.1795 2.1795 97.18 12.148 97.465 12.432 12.432 12.432 3.3216 2.1795 2.1795
index scores: 19.021 99.493 173.97 21.747 190.28 38.057 38.057 690.46 19.327 19.052 16.582
top-k: 2.9263 2.9263 31.213 3.9017 34.14 6.8279 0 123.88 3.1701 2.9415 0.48771
MLA decode: 8.6647 8.6647 0 0 8.6647 8.6647 8.6647 8.6647 8.6647 8.6647 1.4441
MLA prefill: 0 0 2587.9 323.48 2587.9 323.48 323.48 561.84 46.212 2.8882 0
dense MLP: 6.8808 6.8808 293.58 293.58 300.46 300.46 300.46 300.46 80.276 25.23 6.5841
routed experts: 280.29 280.29 391.44 391.44 400.61 400.61 400.61 400.61 280.92 280.92 179.21
shared expert: 1.1468 1.1468 48.93 48.93 50.077 50.077 50.077 50.077 13.379 4.2049 1.0973
dispatch: 9.7277 9.7277 597.71 81.714 599.44 83.442 83.442 83.442 28.156 14.335 8.2879
combine: 11.455 11.455 1187.4 155.43 1190.9 158.88 158.88 158.88 48.313 20.67 8.5759
latent gather: 0 0 0 19.756 0 19.756 19.756 196.09 10.939 8.7347 0
gather and scatter: 23.741 23.741 346.3 346.3 354.04 354.04 354.04 354.04 106.32 44.385 17.29
"""
SPECIFIED = """
projections: 34.379 34.379 1366.2 170.77 1370.2 174.78 174.78 174.78 46.696 34.379 34.379
indexer projections: 1.9524 1.9524 77.587 9.6984 77.815 9.9257 9.9257 9.9257 2.6519 1.9524 1.9524
index scores: 17.039 89.129 138.9 17.362 151.92 30.384 30.384 551.25 17.314 17.067 14.855
top-k: 2.6214 2.6214 27.962 3.4953 30.583 6.1167 0 110.97 2.8399 2.6351 0.43691
MLA decode: 6.9142 6.9142 0 0 6.9142 6.9142 6.9142 6.9142 6.9142 6.9142 1.1524
MLA prefill: 0 0 2415.9 301.99 2415.9 301.99 301.99 503.32 43.141 2.6963 0
dense MLP: 5.8982 5.8982 234.39 234.39 239.88 239.88 239.88 239.88 64.091 20.143 5.8982
routed experts: 251.09 251.09 312.52 312.52 319.84 319.84 319.84 319.84 251.66 251.66 160.54
shared expert: 0.98304 0.98304 39.065 39.065 39.98 39.98 39.98 39.98 10.682 3.3571 0.98304
dispatch: 5.5357 5.5357 528.19 69.524 529.73 71.06 71.06 71.06 21.917 9.631 4.256
combine: 7.0714 7.0714 1052.4 135.05 1055.5 138.12 138.12 138.12 39.833 15.262 4.5119
latent gather: 0 0 0 14.449 0 14.449 14.449 171.19 6.6123 4.6531 0
gather and scatter: 14.881 14.881 301.6 301.6 308.48 308.48 308.48 308.48 88.282 33.231 9.1469
"""
# Milliseconds of a step, a line a case: attention, index, experts and MLPs, exchange, head,
# drafts, all.
ATTAINABLE_STEPS = """
3.6692 0.50665 21.128 1.66 0.063325 1.4846 28.512
3.6692 2.1966 21.128 1.66 0.063325 1.4846 30.202
335.33 6.3497 33.908 134.92 0.063325 0 510.57
41.916 0.79371 33.908 20.366 0.063325 0 97.047
336.39 6.7597 34.703 135.34 0.063325 1.4846 514.74
42.983 1.2037 34.703 20.778 0.063325 1.4846 101.21
42.983 1.0603 34.703 20.778 0.063325 1.4846 101.07
61.575 17.362 34.703 34.531 0.063325 1.4846 149.72
8.8424 0.5422 22.313 6.9073 0.063325 1.4846 40.153
3.8945 0.50762 21.46 3.4398 0.063325 1.4846 30.85
3.106 0.40424 13.543 1.3167 0.063325 0 18.433
"""
SPECIFIED_STEPS = """
3.2209 0.45388 18.923 0.99018 0.053562 1.2824 24.924
3.2209 1.9678 18.923 0.99018 0.053562 1.2824 26.438
295 5.1334 27.072 119.45 0.053562 0 446.71
36.876 0.64167 27.072 17.375 0.053562 0 82.017
295.86 5.4667 27.706 119.81 0.053562 1.2824 450.18
37.727 0.97495 27.706 17.741 0.053562 1.2824 85.485
37.727 0.8465 27.706 17.741 0.053562 1.2824 85.357
53.431 14.115 27.706 29.967 0.053562 1.2824 126.55
7.5466 0.47892 19.868 5.4119 0.053562 1.2824 34.641
3.4312 0.45475 19.187 2.3296 0.053562 1.2824 26.738
2.7715 0.36213 12.132 0.68503 0.053562 0 16.004
"""


def numbers(line):
    return [float(number) for number in line.split()]


def operator_table(text):
    pairs = (row.split(":") for row in text.split("\n")[1:-1])
    return {name: numbers(line) for name, line in pairs}


RATES = {
    "attainable": (operator_table(ATTAINABLE), ATTAINABLE_STEPS.split("\n")[1:-1]),
    "specified": (operator_table(SPECIFIED), SPECIFIED_STEPS.split("\n")[1:-1]),
}


def ledger_of(case, rates="attainable"):
    drafts = case.drafts if case.requests else 0
    chunks = (ChunkShape(case.prefill, case.prefix, sampled=False),) if case.prefill else ()
    # The last row sees the whole context; there every row does: 0.002 % more.
    groups = (GroupShape(CONTEXT, 1, case.drafts),) * case.requests
    return make_ledger(
        GLM,
        StepShape(chunks=chunks, groups=groups, new_drafts=drafts),
        formats=make_formats(GLM),
        hardware=HARDWARE["h200"][rates],
        layout=Layout(8, 8, 8, split_chunks=case.split),
        method=case.method,
    )


def seconds(ledger, part, name):
    """0 where the step has no such stage."""
    try:
        return ledger.floor(ledger.find(part, name)).seconds
    except KeyError:
        return 0.0


def operators(ledger):
    """Seconds of one layer by the other calculation's operators, its coarser choices put in."""
    hardware, layout = ledger.setting.hardware, ledger.setting.layout
    repeated = RANKS_WITH_REPETITION / layout.devices_of_row(256, 8)
    index = ledger.find(FULL, "indexer projections")
    demand = index.demand._replace(read=index.demand.read - INDEX_HEAD_WEIGHTS)

    def exchanged(name, value_bytes):
        copies = ledger.find(SPARSE, name).count * repeated
        return copies * HIDDEN * 1.02 * value_bytes / hardware.link + hardware.collective

    pairs = sum(chunk.pairs_within(2048) for chunk in ledger.shape.chunks)
    short = sum(min(chunk.rows, max(0, 2048 - chunk.prefix)) for chunk in ledger.shape.chunks)
    triangle = 1 - short / 2 / pairs if pairs else 1
    gathered = ledger.find(DENSE, "gather rows").demand.sent / SCALED
    scattered = ledger.find(DENSE, "scatter sums").demand.sent
    return {
        "projections": sum(
            seconds(ledger, LAYER, name)
            for name in ("q, kv projections", "latent up-projections", "output projection")
        ),
        "indexer projections": index.floor(hardware, only=demand).seconds,
        "index scores": seconds(ledger, FULL, "index scores"),
        "top-k": seconds(ledger, FULL, "top-k"),
        "MLA decode": seconds(ledger, LAYER, "sparse MLA, groups"),
        "MLA prefill": triangle * seconds(ledger, LAYER, "sparse MLA, chunks"),
        "dense MLP": seconds(ledger, DENSE, "dense MLP"),
        "routed experts": seconds(ledger, SPARSE, "routed experts"),
        "shared expert": seconds(ledger, SPARSE, "shared expert"),
        "dispatch": exchanged("dispatch", 1),
        "combine": exchanged("combine", 2),
        "latent gather": seconds(ledger, LAYER, "latent gather"),
        "gather and scatter": (gathered + scattered) / hardware.link + 2 * hardware.collective,
    }


def step_sums(ledger):
    """Seconds of a step: attention, index, experts and MLPs, exchange, head, drafts, all."""
    own, hardware = operators(ledger), ledger.setting.hardware
    attention = 78 * (own["projections"] + own["MLA decode"] + own["MLA prefill"])
    index = 21 * (own["indexer projections"] + own["index scores"] + own["top-k"])
    feed = 75 * (own["routed experts"] + own["shared expert"]) + 3 * own["dense MLP"]
    exchange = 75 * (own["dispatch"] + own["combine"]) + 78 * own["latent gather"]
    exchange += 3 * own["gather and scatter"]
    head = ledger.floor(ledger.find(STEP, "head"))
    head = head.memory + head.link
    drafts = 0.0
    if ledger.shape.new_drafts:
        # Five like passes, not one over all rows and four; projections of all weights in each.
        weights = sum(
            ledger.floor(ledger.find(LAYER, name)).memory
            for name in ("q, kv projections", "latent up-projections", "output projection")
        )
        if ledger.shape.prefill_rows:
            weights = 165_019_648 / hardware.memory
        experts = seconds(ledger, LATER_PASS, "routed experts")
        drafts = 5 * (experts + weights + head + 2 * hardware.collective)
    parts = attention, index, feed, exchange, head, drafts
    return (*parts, sum(parts))


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_operators_take_the_published_time(rates, number):
    found = operators(ledger_of(CASES[number], rates))
    table, _ = RATES[rates]
    for name, row in table.items():
        assert 1e6 * found[name] == pytest.approx(row[number], rel=1e-3), name


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_steps_take_the_published_time(rates, number):
    found = step_sums(ledger_of(CASES[number], rates))
    _, table = RATES[rates]
    for own, expected in zip(found, numbers(table[number]), strict=True):
        assert 1e3 * own == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("chunk", "worst", "first_token", "sixteen_steps"),
    [
        (8192, 101.21, 101.21, 528.89),
        (4096, 61.756, 119.18, 518.35),
        (2048, 44.613, 173.1, 515.24),
        (1024, 36.54, 285.18, 513.28),
        (512, 33.311, 522.3, 522.3),
    ],
)
def test_chunk_sizes_trade_waiting_for_the_first_token(chunk, worst, first_token, sixteen_steps):
    decode = 1e3 * step_sums(ledger_of(CASES[0]))[-1]
    steps = [
        1e3 * step_sums(ledger_of(Case(chunk, place, 32, 5, True)))[-1]
        for place in range(0, 8192, chunk)
    ]
    assert max(steps) == pytest.approx(worst, rel=1e-3)
    assert sum(steps) == pytest.approx(first_token, rel=1e-3)
    rest = (16 - len(steps)) * decode
    assert sum(steps) + rest == pytest.approx(sixteen_steps, rel=1e-3)


@pytest.mark.parametrize(
    ("split", "together", "stretch"), [(False, 0.955, 18.05), (True, 0.806, 3.55)]
)
def test_mixing_saves_the_published_share(split, together, stretch):
    decode, prefill, mixed = (
        step_sums(ledger_of(Case(rows, 0, requests, 5, split)))[-1]
        for rows, requests in ((0, 32), (8192, 0), (8192, 32))
    )
    assert mixed / (prefill + decode) == pytest.approx(together, abs=5e-4)
    assert mixed / decode == pytest.approx(stretch, abs=5e-3)
    assert 1e3 * (mixed - prefill) == pytest.approx(4.17, abs=5e-3)


def test_the_whole_floor_has_what_the_coarser_one_leaves_out():
    ledger = ledger_of(CASES[5])
    whole, coarse = ledger.seconds, step_sums(ledger)[-1]
    router = 75 * seconds(ledger, SPARSE, "router")
    first_pass = ledger.sums["MTP first pass"].seconds
    assert whole - coarse == pytest.approx(router + first_pass, rel=0.1)
    assert whole == pytest.approx(1.065 * coarse, rel=0.01)
