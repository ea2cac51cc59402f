"""The step log: every row and token of a run is in it once, and it reads back as it was."""

import json

import pytest
from engine.fake_executor import Story
from observe.lives import Life
from observe.planted_log import PlantedLog

from bucketing.cell import Cell
from glm_jax.engine.admission import QueueFullError
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.declined import Reason
from glm_jax.engine.outputs import RequestRows
from glm_jax.model.presets import PRESETS
from glm_jax.observe.log_header import header_now, read_header, write_header
from glm_jax.observe.step_line import LoggedStep, read_line, write_line
from glm_jax.observe.step_log import StepLog, StepLogWarning, read_step_log

LIVES = (
    {},
    {"enable_prefix_caching": False},
    {"num_speculative_tokens": 3, "num_pages": 40},
    {"decode_loop_steps": 5},
    {"decode_loop_steps": 5, "num_speculative_tokens": 2},
    {"max_num_batched_tokens": 3, "max_step_ms": 0.7, "num_pages": 14},
    {"step_policy": "alternate", "max_num_seqs": 2},
    {"split_steps": True},
)


def lived(tmp_path, seed, **options):
    """A random life and its log."""
    path = tmp_path / "steps.jsonl"
    life = Life(seed, **options)
    log = StepLog(path, header_now(life.story.config))
    life.story.engine.watches.append(log.add)
    names = life.live(8)
    log.close()
    return life, names, read_step_log(path)


def prefill_rows(record) -> int:
    return sum(rows.known for rows in record.rows if rows.prefill)


@pytest.mark.parametrize("options", LIVES)
def test_every_row_of_the_device_is_in_the_log_once(tmp_path, options):
    for seed in range(4):
        life, _, log = lived(tmp_path, seed, **options)
        ran = [record for record in log.records if record.cell is not None]
        assert len(ran) == len(life.written)
        for record, written in zip(ran, life.written, strict=True):
            useful = record.prefill_rows + record.decode_rows
            assert useful == sum(rows.known + rows.drafts for rows in record.rows)
            assert useful + record.pad_rows == record.cell.rows
            assert written in (useful, -1)


@pytest.mark.parametrize("options", LIVES)
def test_rows_are_prompts_and_tokens(tmp_path, options):
    options = {**options, "num_pages": 60}
    for seed in range(4):
        life, names, log = lived(tmp_path, seed, **options)
        outputs = {name: life.story.output(name) for name in names}
        assert not any(record.preempted for record in log.records)
        for name, output in outputs.items():
            (completion,) = output.outputs
            rows = [
                rows
                for record in log.records
                for who, rows in zip(record.request_ids, record.rows, strict=True)
                if who == name
            ]
            got = [record.tokens[name] for record in log.records if name in record.tokens]
            ends = [record.ended[name] for record in log.records if name in record.ended]
            assert sum(got) == len(completion.token_ids)
            assert ends == [completion.finish_reason]
            if completion.finish_reason == "abort":
                continue
            computed = sum(one.known for one in rows if one.prefill)
            assert computed == len(output.prompt_token_ids) - output.num_cached_tokens
            if not life.story.config.decode_loop_steps:
                # The first token is drawn at the prompt's last row; drafts that were right are no
                # known rows.
                known = sum(one.known for one in rows if not one.prefill)
                accepted = output.drafts.accepted_tokens
                assert known == len(completion.token_ids) - 1 - accepted


def test_a_prompt_of_ten_in_chunks_of_four_beside_a_decode(tmp_path):
    path = tmp_path / "steps.jsonl"
    story = Story(max_num_batched_tokens=4)
    log = StepLog(path, header_now(story.config))
    story.engine.watches.append(log.add)
    story.add("decodes", [1, 2, 3], max_tokens=20)
    story.step()
    story.add("prompt", list(range(10)), max_tokens=1)
    story.finish()
    log.close()
    records = [one for one in read_step_log(path).records if "prompt" in one.request_ids]
    assert [prefill_rows(record) for record in records] == [4, 4, 2]
    assert [record.decode_rows for record in records] == [1, 1, 1]
    assert [record.kind for record in records] == ["mixed"] * 3
    assert records[0].arrived[0][2:] == (10, 1, 1)
    assert [record.rows[0] for record in records] == [
        RequestRows(4, 0, 0, True),
        RequestRows(4, 0, 4, True),
        RequestRows(2, 0, 8, True),
    ]
    assert records[-1].tokens == {"decodes": 1, "prompt": 1}
    assert records[-1].ended == {"prompt": "length"}


def test_a_line_reads_back_as_it_was(tmp_path):
    for options in LIVES:
        _, _, log = lived(tmp_path, 1, **options)
        for step in log.steps:
            assert read_line(write_line(step)) == step
    planted = PlantedLog(0, drafts=2)
    planted.preempt("r1", pages=2)
    planted.compile()
    step = LoggedStep(planted.last, tuple(planted.compiles))
    again = read_line(write_line(step))
    assert again.compiles == step.compiles
    assert again.record.rows == step.record.rows
    assert again.record.drafts == step.record.drafts
    assert again.record.started == pytest.approx(step.record.started, abs=1e-6)


def test_the_header_reads_back_as_it_was():
    header = header_now(EngineConfig(num_speculative_tokens=3), PRESETS["glm-5.3"], "gpu")
    assert read_header(write_header(header)) == header


def declined(records, name) -> list[Reason]:
    """Why a request got no rows, step by step."""
    return [
        note.reason for record in records for note in record.declined if name in note.request_ids
    ]


def test_the_log_says_what_kept_a_request_out():
    story = Story(max_num_seqs=1)
    story.add("first", [1] * 6, max_tokens=3)
    story.add("second", [2] * 6, max_tokens=1)
    story.finish()
    # The step of the first one's end still holds its slot.
    assert set(declined(story.records, "second")) == {Reason.NO_SLOTS}
    assert len(declined(story.records, "second")) == 3


@pytest.mark.parametrize(
    ("options", "prompts", "reason"),
    [
        ({"num_pages": 7}, ([1] * 12, [2] * 12), Reason.NO_PAGES),
        ({"max_num_batched_tokens": 4}, ([1] * 12, [2] * 3), Reason.BUDGET),
        (
            {"max_num_batched_tokens": 32, "prefill_buckets": (32,)},
            ([1] * 12, [1] * 13),
            Reason.WRITING,
        ),
        (
            {"max_num_partial_prefills": 1, "long_prefill_token_threshold": 4},
            ([1] * 12, [2] * 12),
            Reason.PARTIAL,
        ),
        ({"step_policy": "alternate"}, ([1] * 4, [2] * 20), Reason.POLICY),
    ],
)
def test_other_reasons_are_told(options, prompts, reason):
    story = Story(**options)
    for number, prompt in enumerate(prompts):
        story.add(f"q{number}", prompt, max_tokens=6)
    story.finish()
    reasons = {*declined(story.records, "q0"), *declined(story.records, "q1")}
    assert reason in reasons


def test_preemption_and_its_wait_are_told():
    story = Story(num_pages=7, max_num_batched_tokens=8, watermark=0.0)
    story.add("old", [1] * 8, max_tokens=12)
    story.add("new", [2] * 8, max_tokens=12)
    story.finish()
    steps = [record for record in story.records if record.preempted]
    assert [record.preempted for record in steps] == [("new",)]
    assert declined(steps, "new") == [Reason.PREEMPTION]
    assert Reason.NO_PAGES in declined(story.records, "new")
    assert sum(prefill_rows(record) for record in story.records) > 16


def test_a_full_queue_is_counted():
    story = Story(max_queued_requests=1)
    story.add("first", [1], max_tokens=1)
    with pytest.raises(QueueFullError):
        story.add("second", [1], max_tokens=1)
    assert story.step().record.refused == 1
    assert story.records[-1].arrived[0].request_id == "first"


def test_an_abort_between_steps_is_news_of_the_next_one():
    story = Story()
    story.add("gone", [1, 2, 3], max_tokens=9)
    story.step()
    story.engine.abort("gone")
    record = story.step().record
    assert (record.kind, record.ended) == ("idle", {"gone": "abort"})


def test_many_that_wait_are_counted_and_a_few_named():
    story = Story(max_num_seqs=1)
    for number in range(40):
        story.add(f"q{number}", [number + 1], max_tokens=1)
    (note,) = story.step().record.declined
    assert (note.reason, note.count, len(note.request_ids)) == (Reason.NO_SLOTS, 39, 16)


def test_idle_steps_are_left_out(tmp_path):
    log = StepLog(tmp_path / "steps.jsonl", header_now(EngineConfig()))
    story = Story()
    story.engine.watches.append(log.add)
    story.step()
    assert log.steps == 0


def test_programs_appear_with_the_next_step(tmp_path):
    path = tmp_path / "steps.jsonl"
    log = StepLog(path, header_now(EngineConfig()))
    planted = PlantedLog(0)
    planted.decode(2)
    log.add(planted.records[0])
    log.compiled("P=64 G=8 Q=1", "compiled", 3.5)
    log.add(planted.records[1])
    log.close()
    first, second = read_step_log(path).steps
    assert first.compiles == ()
    (event,) = second.compiles
    assert event[:3] == ("P=64 G=8 Q=1", "compiled", 3.5)


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    _, _, whole = lived(tmp_path, 0)
    path = tmp_path / "steps.jsonl"
    path.write_text(path.read_text()[:-20])
    assert read_step_log(path).steps == whole.steps[:-1]


@pytest.mark.parametrize("content", ["", "hello\n", '{"format":"other","version":1}\n'])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "other"
    path.write_text(content)
    with pytest.raises(ValueError, match="begins no step log of version 1"):
        read_step_log(path)


def test_a_broken_line_is_refused(tmp_path):
    _, _, log = lived(tmp_path, 0)
    path = tmp_path / "steps.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = json.dumps({"step": 1})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="is no line of a step log"):
        read_step_log(path)
    assert log.header.engine.page_size == 4


def test_a_full_disk_ends_the_log_and_not_the_engine(tmp_path):
    log = StepLog(tmp_path / "steps.jsonl", header_now(EngineConfig()))
    planted = PlantedLog(0)
    planted.decode(1)

    class Full:
        closed = False

        def write(self, text):
            raise OSError("no space left on device")

        def close(self):
            self.closed = True

    log._file.close()
    log._file = Full()
    with pytest.warns(StepLogWarning, match="ends after 0 steps: no space left"):
        log.add(planted.last)
    log.add(planted.last)
    log.close()


def test_a_mixed_step_names_its_cell_and_what_was_predicted():
    story = Story(max_num_batched_tokens=4)
    story.add("decodes", [1, 2, 3], max_tokens=9)
    story.step()
    story.add("prompt", [5] * 4, max_tokens=1)
    record = story.step().record
    assert record.cell == Cell(4, 1, 1)
    # The prior: rows and an overhead, at a nominal 10 us.
    assert record.predicted == pytest.approx((5 + 64) * 1e-5)
    assert (record.occupancy.running, record.occupancy.waiting) == (2, 0)
