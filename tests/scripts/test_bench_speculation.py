"""The figures of the benchmark of speculation, from steps that were made up."""

import argparse

import pytest

from bucketing.cell import Cell
from glm_jax.engine.outputs import GroupDrafts, HostPhases, StepRecord, StepResult, StreamDelta
from scripts.bench_speculation import check, summarise, widths_used
from scripts.speculation.acceptance import acceptance_of, first_groups
from scripts.speculation.figures import best_fixed, equal_outputs, judge, ratios, spread_of
from scripts.speculation.generation import Generation, generate
from scripts.speculation.prompts import cut_windows
from scripts.speculation.steps import full_decodes, host_seconds
from scripts.speculation.tables import show

HOST = HostPhases(schedule=0.1, pack=0.2, dispatch=0.3, fetch=5.0, commit=0.4)


def record(cell=(0, 1, 1), seconds=1.0, **changes):
    cell = Cell(*cell)
    fields = {
        "index": 0,
        "kind": "decode",
        "cell": cell,
        "prefill_rows": 0,
        "prefill_pad_rows": 0,
        "decode_rows": cell.groups * cell.width,
        "decode_pad_rows": 0,
        "request_ids": (),
        "phases": HOST,
        "wall_time": seconds,
        "mode": "FULL",
    }
    return StepRecord(**{**fields, **changes})


def groups_of(*pairs, request="a"):
    """Verified groups of (drafts, accepted)."""
    return [GroupDrafts(request, tuple(range(drafts)), accepted) for drafts, accepted in pairs]


def test_windows_leave_out_the_beginning_of_every_file():
    files = [list(range(7)), list(range(10, 13)), list(range(20, 24))]
    assert cut_windows(files, 2) == [[2, 3], [22, 23], [4, 5]]


def test_acceptance_is_counted_of_all_drafts_and_of_those_that_were_reached():
    found = acceptance_of(groups_of((2, 0), (2, 1), (2, 2), (1, 1), (3, 2)))
    assert found.groups == 5
    assert found.length == pytest.approx(1 + 6 / 5)
    assert found.of_all == pytest.approx([4 / 5, 2 / 4, 0])
    assert found.of_reached == pytest.approx([4 / 5, 2 / 3, 0])
    assert found.reached == [5, 3, 1]


def test_without_drafts_every_step_gives_one_token():
    assert acceptance_of([]) == (0, 1.0, [], [], [])


def test_the_first_group_of_every_request_is_kept():
    groups = [*groups_of((5, 1), (5, 2)), *groups_of((5, 3), request="b")]
    assert [group.accepted for group in first_groups(groups)] == [1, 3]


def test_decoding_counts_from_the_first_token_of_all_to_the_last_of_all():
    generation = Generation([[1, 2, 3], [4, 5]], [[1.0, 2.0, 2.5], [2.0, 4.0]], [])
    assert generation.decode_rate == pytest.approx(2 / 2.0)


def test_only_full_steps_of_full_groups_count():
    good = record((0, 8, 6))
    others = [
        record((0, 8, 6), decode_rows=42),
        record((0, 8, 6), mode="PIECEWISE"),
        record((64, 8, 6), kind="mixed"),
        record((0, 8, 1)),
    ]
    assert full_decodes([*others, good], 8, 6) == [good]


def test_host_time_leaves_out_the_wait_for_the_device():
    found = host_seconds([record()])
    assert found["all"] == pytest.approx(1.0)
    assert found["dispatch"] == pytest.approx(0.3)


def test_the_best_fixed_length_is_found_round_by_round():
    # The median of "1" alone is higher; its ratios to "0" are not.
    rates = {"0": [10, 20, 30], "1": [30, 21, 3], "2": [12, 24, 4], "auto": [99, 99, 99]}
    assert best_fixed(rates) == "2"
    assert ratios(rates["2"], rates["0"]) == pytest.approx([1.2, 1.2, 4 / 30])
    assert spread_of([3, 1, 2]) == (2, 1, 3)


@pytest.mark.parametrize(
    ("length", "speed", "owed", "met"),
    [(1.6, 1.3, True, True), (1.6, 1.2, True, False), (1.4, 1.0, False, False)],
)
def test_the_speed_is_owed_above_the_threshold(length, speed, owed, met):
    verdict = judge(length, 2.0, speed)
    assert (verdict.threshold, verdict.needed) == (1.5, 2.5)
    assert (verdict.owed, verdict.met) == (owed, met)


def test_outputs_are_equal_to_the_end_or_not():
    assert equal_outputs([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == 0.5


class FakeEngine:
    """Gives every request two tokens a step, three steps long."""

    def __init__(self, fault=None):
        self.names, self.forgotten, self.steps, self.fault = [], [], 0, fault

    def add_request(self, name, prompt, params):
        self.names.append(name)

    @property
    def has_unfinished(self):
        return self.steps < 3

    def step(self):
        self.steps += 1
        tokens = [self.steps, 10 * self.steps]
        deltas = [StreamDelta(name, "", tokens, None, None, None) for name in self.names]
        return StepResult(deltas, record(fault=self.fault))

    def forget(self, name):
        self.forgotten.append(name)


def test_every_token_of_a_step_has_its_time():
    engine = FakeEngine()
    made = generate(engine, [[1], [2]], [None, None])
    assert made.tokens == [[1, 10, 2, 20, 3, 30]] * 2
    assert made.times[0] == sorted(made.times[0])
    assert len(set(made.times[0])) == 3
    assert len(made.records) == 3
    assert engine.forgotten == engine.names


def test_a_failed_step_ends_the_benchmark():
    with pytest.raises(RuntimeError, match="failed: lost"):
        generate(FakeEngine("lost"), [[1]], [None])


def made_up(name, width, seconds, accepted):
    """Two rounds of a request; its steps take so long and accept so many drafts each."""
    drafted = [tuple(groups_of((width - 1, count)))[: width - 1] for count in accepted]
    records = [record((0, 1, width), seconds, drafter=width > 1, drafts=one) for one in drafted]
    times = [0.0]
    for step, count in enumerate(accepted, start=1):
        times += [step * seconds] * (1 + count)
    return {name: [Generation([list(range(len(times)))], [times], records)] * 2}


def test_a_summary_compares_speeds_steps_and_what_is_owed(capsys):
    made = {
        **made_up("0", 1, 1.0, [0] * 6),
        **made_up("2", 3, 1.5, [2, 2]),
        **made_up("auto", 6, 1.0, [5]),
    }
    result = summarise(made, 1, 0.0)
    side = result["sides"]["2"]
    assert result["best"] == "2"
    assert side["to_none"]["median"] == pytest.approx(2.0)
    assert (side["step_ratio"], side["length"]) == pytest.approx((1.5, 3.0))
    assert (side["verdict"]["owed"], side["verdict"]["met"]) == (True, True)
    assert result["sides"]["auto"]["to_best"]["median"] == pytest.approx(3.0)
    assert widths_used(made["auto"]) == {"6": 1.0}
    text = {"drafts": "2", **acceptance_of(groups_of((2, 1)))._asdict()}
    show({"model": "m", "text": text, "drafter_share": {"1": {"2": 0.25}}, "results": [result]})
    shown = capsys.readouterr().out
    assert "1.25x is owed above 1.38" in shown
    assert "auto is -200.0% behind 2 drafts, within 3%" in shown


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"drafts": ["1"]}, "0 must be among them"),
        ({"rounds": 0}, "at least 1"),
        ({"prompt": 100}, "multiple of 64"),
        ({"tokens": 16}, "at least"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, named):
    good = {"drafts": ["0", "1"], "rounds": 1, "prompt": 64, "tokens": 256}
    check(argparse.Namespace(**good))
    with pytest.raises(ValueError, match=named):
        check(argparse.Namespace(**{**good, **changes}))
