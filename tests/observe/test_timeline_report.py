"""The report of a log: its figures are sums over the log, its picture and its page are whole."""

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from engine.fake_executor import Story
from observe.lives import Life
from observe.planted_log import CHUNK, PlantedLog

from glm_jax.engine.config import EngineConfig
from glm_jax.engine.outputs import HostPhases
from glm_jax.observe.log_header import header_now
from glm_jax.observe.step_line import LoggedStep
from glm_jax.observe.step_log import StepLogFile
from glm_jax.observe.timeline_figure import mixed_spans, picture
from glm_jax.observe.timeline_page import page
from glm_jax.observe.timeline_signals import signals_of
from glm_jax.observe.timeline_table import sums_by_kind, sums_of_waits, title_of

LIVES = (
    {},
    {"decode_loop_steps": 5, "num_speculative_tokens": 2},
    {"step_policy": "alternate", "max_num_seqs": 2},
)
PNG = b"\x89PNG\r\n\x1a\n"


def log_of(records) -> StepLogFile:
    return StepLogFile(header_now(EngineConfig(), device="cpu"), tuple(map(LoggedStep, records)))


@pytest.fixture(scope="module")
def planted():
    """6 requests decode; 4 chunks join them; then a step is not FULL."""
    planted = PlantedLog(0)
    planted.decode(10)
    planted.chunks(3)
    planted.decode(5)
    planted.chunks(1)
    planted.step(mode="PIECEWISE")
    return planted


@pytest.mark.parametrize("options", LIVES)
def test_figures_are_sums_over_the_log(options):
    life = Life(7, **options)
    life.live(8)
    records = [record for record in life.records if record.cell is not None]
    signals = signals_of(log_of(life.records))
    sums = sums_by_kind(signals)
    assert signals.mixed.tolist() == [record.kind == "mixed" for record in records]
    prompt = {
        kind: sum(
            rows.known
            for record in records
            for rows in record.rows
            if rows.prefill and record.kind == kind
        )
        for kind in ("prefill", "decode", "mixed")
    }
    for one in sums:
        of_kind = [record for record in records if record.kind == one.kind]
        useful = sum(record.prefill_rows + record.loop_rows for record in of_kind)
        pads = sum(record.pad_rows for record in of_kind)
        assert one.steps == len(of_kind)
        assert one.prefill_rows == prompt[one.kind]
        assert one.decode_rows == useful - prompt[one.kind]
        assert one.pad_share == pytest.approx(pads / (useful + pads))
        times = [record.wall_time * 1e3 for record in of_kind]
        assert one.median_ms == pytest.approx(np.median(times))
    assert sum(one.steps for one in sums) == len(records)


def test_every_token_but_the_first_ends_a_wait():
    life = Life(8)
    names = life.live(8)
    signals = signals_of(log_of(life.records))
    tokens = [len(life.story.output(name).outputs[0].token_ids) for name in names]
    assert len(signals.waits) == sum(max(0, count - 1) for count in tokens)
    assert sum(one.waits for one in sums_of_waits(signals.waits)) == len(signals.waits)


def test_waits_know_the_prompt_rows_computed_meanwhile(planted):
    signals = signals_of(log_of(planted.records))
    assert [wait.prefill_rows for wait in signals.waits if wait.request_id == "r0"] == [
        *[0] * 9,
        *[CHUNK] * 3,
        *[0] * 5,
        CHUNK,
        0,
    ]
    without, beside = sums_of_waits(signals.waits)
    assert (without.waits, beside.waits) == (15 * 6, 4 * 6)
    assert beside.median_ms > without.median_ms


def test_modes_are_counted(planted):
    signals = signals_of(log_of(planted.records))
    assert signals.steps_by_mode() == {"FULL": 19, "PIECEWISE": 1}


def test_mixed_steps_that_follow_each_other_are_one_span(planted):
    records = planted.records
    first, last, single = records[10], records[12], records[18]
    zero = records[0].started
    spans = [
        (first.started, last.started + last.wall_time),
        (single.started, single.started + single.wall_time),
    ]
    found = list(mixed_spans(signals_of(log_of(records))))
    np.testing.assert_allclose(found, np.array(spans) - zero)


def test_the_device_is_busy_from_the_dispatch_until_its_outputs_are_there(planted):
    phases = HostPhases(schedule=1e-3, dispatch=0.5e-3, device=2e-3, fetch=0.25e-3)
    records = [replace(record, phases=phases) for record in planted.records]
    ends = [record.started + record.wall_time for record in records]
    signals = signals_of(log_of(records))
    total = ends[-1] - records[0].started
    between = np.diff([records[0].started, *ends])
    np.testing.assert_allclose(signals.busy, 2.5e-3 / between)
    assert signals.busy_share == pytest.approx(len(records) * 2.5e-3 / total)


def test_a_lost_step_is_left_out(planted):
    lost = replace(planted.records[3], kind="fault", fault="fetch: broken")
    signals = signals_of(log_of([*planted.records[:3], lost, *planted.records[4:]]))
    assert len(signals.starts) == len(planted.records) - 1
    assert signals.steps_by_mode() == {"FULL": 18, "PIECEWISE": 1}


def test_an_id_that_is_used_again_is_another_line():
    story = Story()
    for _ in range(2):
        story.add("same", [1, 2, 3], max_tokens=3)
        story.finish()
        story.engine.forget("same")
    names = [wait.request_id for wait in signals_of(log_of(story.records)).waits]
    assert names == ["same", "same", "same #2", "same #2"]


def test_time_begins_with_the_first_arrival():
    story = Story()
    story.add("a", [1, 2, 3], max_tokens=2)
    story.finish()
    arrival = story.records[0].arrived[0].time
    signals = signals_of(log_of(story.records))
    assert signals.starts[0] == pytest.approx(story.records[0].started - arrival)


def test_a_log_without_rows_is_refused():
    with pytest.raises(ValueError, match="no step of the log has rows"):
        signals_of(log_of([]))


def test_the_picture_is_a_png(planted):
    signals = signals_of(log_of(planted.records))
    assert picture(signals, title_of(signals, "cpu")).startswith(PNG)


def test_a_single_step_can_be_drawn():
    planted = PlantedLog(0)
    planted.decode(1)
    assert picture(signals_of(log_of(planted.records))).startswith(PNG)


def test_the_title_counts_steps(planted):
    signals = signals_of(log_of(planted.records))
    seconds = f"{signals.ends[-1]:.3g}"
    assert title_of(signals, "cpu") == f"20 steps in {seconds} s on cpu: 16 decode, 4 mixed"


class Reader(HTMLParser):
    """The cells of all tables, and what a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[list[str]] = []
        self.references: list[str] = []
        self.opened: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.references += [value for name, value in attrs if name in ("src", "href")]
        if tag == "tr":
            self.cells.append([])
        if tag not in ("meta", "img"):
            self.opened.append(tag)

    def handle_endtag(self, tag):
        assert self.opened.pop() == tag

    def handle_data(self, data):
        if self.opened and self.opened[-1] in ("td", "th"):
            self.cells[-1].append(data)


def test_the_page_needs_nothing_else_and_holds_the_sums(planted):
    text = page(signals_of(log_of(planted.records)), device="<cpu>")
    reader = Reader()
    reader.feed(text)
    assert reader.opened == []
    (source,) = reader.references
    head, encoded = source.split(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(encoded).startswith(PNG)
    assert not re.search(r"https?:|url\(|@import", text)
    assert "&lt;cpu&gt;" in text
    rows = {row[0]: row[1:] for row in reader.cells}
    assert rows["decode"][:4] == ["16", "0", str(16 * 6), f"{32 / 128:.1%}"]
    assert rows["mixed"][:3] == ["4", str(4 * CHUNK), str(4 * 6)]
    assert rows["FULL"] == ["19"]
    assert rows["PIECEWISE"] == ["1"]
    assert rows["prompt rows meanwhile"][0] == "24"
