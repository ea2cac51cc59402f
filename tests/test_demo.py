"""The demo: what happens under each policy, and what is said of it. No timing decides a test."""

import argparse
import inspect
import io
import json

import pytest
from engine.fake_executor import character_tokenizer
from rich.console import Console

import glm_jax
from bucketing.grid import Cell
from glm_jax.cli import main
from glm_jax.demo.comparison import POLICIES, Comparison, turns
from glm_jax.demo.prompts import make_prompts
from glm_jax.demo.report import Difference, differences, figures_of, report
from glm_jax.demo.run import NEWCOMER, Run
from glm_jax.demo.scenario import SETTLED_TOKENS, Scenario
from glm_jax.demo.table import live_run, summary
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.outputs import HostPhases, StepRecord, StepResult, StreamDelta

# As large as the programs of tiny_llm allow: the long prompt is two chunks, the second with pads.
SCENARIO = Scenario(requests=3, prompt_length=16, arrival_length=100, chunk=64, max_tokens=20)
FLAGS = [
    "--requests=3",
    "--prompt-length=16",
    "--arrival-length=100",
    "--chunk=64",
    "--max-tokens=20",
]


@pytest.fixture(scope="module")
def comparison(tiny_llm):
    vocab_size = tiny_llm.model_config.vocab_size
    return Comparison(
        tiny_llm.config,
        tiny_llm.runner,
        make_prompts(SCENARIO, None, vocab_size),
        vocab_size=vocab_size,
        max_tokens=SCENARIO.max_tokens,
    )


@pytest.fixture(scope="module")
def runs(comparison):
    comparison.warm_up()
    return {policy: comparison.run(policy) for policy in POLICIES}


# What the engine does.


def test_policies_order_chunks_and_decodes(runs):
    kinds = {policy: [step.record.kind for step in run.steps] for policy, run in runs.items()}
    assert kinds["prefill_first"][:3] == ["prefill", "prefill", "decode"]
    assert kinds["alternate"][:4] == ["prefill", "decode", "prefill", "decode"]
    assert kinds["mixed"][:3] == ["mixed", "mixed", "decode"]
    for one in kinds.values():
        assert set(one[4:]) == {"decode"}


def test_policies_cut_the_prompt_alike(runs):
    for run in runs.values():
        chunks = [step.record.prefill_rows for step in run.steps if step.record.prefill_rows]
        assert chunks == [64, 36]


def test_useful_and_pad_rows_fill_the_cell(tiny_llm, runs):
    # Three of four groups decode, each with as many drafts as fit.
    rest = tiny_llm.config.widths[-1]
    expected = {"prefill_first": [0, 28], "alternate": [0, rest], "mixed": [rest, 28 + rest]}
    for run in runs.values():
        for step in run.steps:
            assert step.useful_rows + step.pad_rows == step.record.cell.rows
        assert [step.pad_rows for step in run.steps[:2]] == expected[run.policy]


def test_decoding_requests_wait_for_the_steps_without_them(runs):
    for policy, count in {"prefill_first": 3, "alternate": 2, "mixed": 1}.items():
        run = runs[policy]
        waited = sum(step.record.wall_time for step in run.steps[:count])
        firsts = [run.gaps(name)[0] for name in run.requests]
        assert firsts == pytest.approx([waited] * 3)


def test_gaps_add_up_to_the_last_token(runs):
    for run in runs.values():
        for name in run.requests:
            last = max(step.end for step in run.steps if name in step.gaps)
            assert sum(run.gaps(name)) == pytest.approx(last)
            assert SCENARIO.max_tokens - len(run.gaps(name)) >= SETTLED_TOKENS


def test_newcomer_starts_at_the_end_of_its_prompt(runs):
    for run in runs.values():
        last_chunk = max(step.end for step in run.steps if step.record.prefill_rows)
        assert run.first_token == last_chunk
        assert run.total == run.steps[-1].end > last_chunk


def test_tokens_are_the_same_under_every_policy(runs):
    names = {"r1", "r2", "r3", NEWCOMER}
    for run in runs.values():
        assert {name: len(tokens) for name, tokens in run.tokens.items()} == dict.fromkeys(
            names, 20
        )
    assert differences(list(runs.values())) == []


def test_run_repeats(comparison, runs):
    again = comparison.run("mixed")
    assert again.tokens == runs["mixed"].tokens
    cells = [step.record.cell for step in again.steps]
    assert cells == [step.record.cell for step in runs["mixed"].steps]


def test_watch_sees_every_step(comparison):
    seen = []
    run = comparison.run("alternate", lambda run: seen.append(len(run.steps)))
    assert seen == list(range(1, len(run.steps) + 1))


def test_turns_begin_with_another_policy_each_time():
    listed = list(turns(4))
    assert listed[::3] == ["prefill_first", "alternate", "mixed", "prefill_first"]
    assert all(sorted(listed[i : i + 3]) == sorted(POLICIES) for i in range(0, 12, 3))


# The scenario.


def test_engine_options_make_three_programs_and_hold_everyone():
    config = EngineConfig(**Scenario().engine_options())
    assert config.grid().cells() == (Cell(0, 8, 1), Cell(64, 0, 1), Cell(64, 8, 1))
    assert config.max_model_len == 2112
    # 7 requests of 256 tokens, one of 2112, and page 0.
    assert config.pool_pages == 7 * 4 + 33 + 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"requests": 0}, "requests is 0; allowed"),
        ({"chunk": -1}, "chunk is -1; allowed"),
        ({"max_tokens": 62}, "max_tokens is 62, but a decoding request may have 63"),
        ({"arrival_length": 20_000}, "Raise max_tokens or chunk, or lower arrival_length"),
    ],
)
def test_scenario_refuses_sizes_that_show_nothing(sizes, message):
    with pytest.raises(ValueError, match=message):
        Scenario(**sizes)


def test_prompts_are_the_same_windows_every_time():
    prompts = make_prompts(SCENARIO, None, 256)
    assert [len(prompt) for prompt in prompts] == [16, 16, 16, 100]
    assert prompts == make_prompts(SCENARIO, None, 256)
    assert 0 <= min(map(min, prompts)) <= max(map(max, prompts)) < 256
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 4


def test_prompts_are_source_text_where_there_is_a_tokenizer():
    tokenizer = character_tokenizer()
    prompts = make_prompts(SCENARIO, tokenizer, tokenizer.vocab_size)
    assert [len(prompt) for prompt in prompts] == [16, 16, 16, 100]
    # That tokenizer knows no white space.
    text = "".join(tokenizer.decode(prompt) for prompt in prompts)
    assert "".join(inspect.getsource(argparse).split()).startswith(text)


# The figures, on runs with times written out.


def record(kind, milliseconds, **rows):
    numbers = {"prefill_rows": 0, "prefill_pad_rows": 0, "decode_rows": 0, "decode_pad_rows": 0}
    return StepRecord(
        index=0,
        kind=kind,
        cell=Cell(4, 2, 1),
        request_ids=(),
        phases=HostPhases(),
        wall_time=milliseconds / 1e3,
        **{**numbers, **rows},
    )


def made_run(policy, *, decode=10.0, token=7):
    """One decoding request: a chunk of 100 ms without it, then two steps with it."""
    run = Run(policy, ("r1",))

    def delta(name, number):
        return StreamDelta(name, "", [number], None, None, None)

    run.settle(StepResult([delta("r1", 1)], record("decode", 99, decode_rows=1)))
    run.add(StepResult([delta(NEWCOMER, 5)], record("prefill", 100, prefill_rows=4)))
    for _ in range(2):
        rows = {"decode_rows": 1, "decode_pad_rows": 1, "prefill_pad_rows": 4}
        run.add(StepResult([delta("r1", token)], record("decode", decode, **rows)))
    return run


def test_figures_are_medians_over_the_runs_of_a_policy():
    runs = [made_run("mixed", decode=decode) for decode in (10, 30, 14)]
    figures = figures_of([*runs, made_run("alternate")])
    assert list(figures) == ["alternate", "mixed"]
    assert figures["mixed"] == pytest.approx((114, 64, 100, 128, 3, 10 / 16))
    assert figures["alternate"] == pytest.approx((110, 60, 100, 120, 3, 10 / 16))


def test_differences_name_the_first_token_that_is_not_the_first_runs():
    same, other = made_run("alternate"), made_run("mixed", token=8)
    assert differences([made_run("prefill_first"), same]) == []
    assert differences([made_run("prefill_first"), same, other]) == [Difference("r1", "mixed", 1)]


def test_report_says_so_when_tokens_differ():
    runs = [made_run("prefill_first"), made_run("alternate"), made_run("mixed", token=8)]
    content = report(runs)
    assert content["tokens_identical"] is False
    assert content["token_differences"] == [{"request": "r1", "policy": "mixed", "position": 1}]
    assert content["worst_gap_ms_unmixed"] == 110
    assert content["runs"][2]["gaps_ms"] == {"r1": [110, 10]}
    console = Console(file=io.StringIO(), width=100)
    console.print(summary(runs))
    assert "1 of 4 sequences leave those of" in " ".join(console.file.getvalue().split())


def test_run_stops_at_a_failed_step():
    result = StepResult([], record("fault", 1))
    broken = StepRecord(**{**_fields(result.record), "fault": "device: boom"})
    with pytest.raises(RuntimeError, match="step 0 failed: device: boom"):
        Run("mixed", ("r1",)).add(StepResult([], broken))


def _fields(one):
    return {name: getattr(one, name) for name in StepRecord.__dataclass_fields__}


# The command.


@pytest.fixture
def command(tiny_llm, monkeypatch):
    """Run the command on tiny_llm; returns what LLM was asked for."""
    asked = []

    def make(model, **options):
        asked.append((model, options))
        return tiny_llm

    monkeypatch.setattr(glm_jax, "LLM", make)
    return lambda *flags: (main(["demo", *FLAGS, *flags]), asked)


def test_what_observes_the_model_sees_every_run_but_not_the_warm_up(
    command, monkeypatch, tiny_llm, capfd
):
    records = []
    monkeypatch.setattr(tiny_llm.engine, "watches", [records.append])
    command("--json", "--repeat", "1", "--step-log", "file")
    capfd.readouterr()
    # The warm-up's requests are called "first" and "second".
    assert {name for one in records for name in one.request_ids} == {"r1", "r2", "r3", "new"}
    assert sum(record.ended.get("new") == "length" for record in records) == 3


def test_json_is_all_there_is_on_the_output(command, capfd):
    code, asked = command("--json", "--model", "somewhere")
    printed = capfd.readouterr()
    assert code == 0
    assert asked == [("somewhere", {"step_log": None, **SCENARIO.engine_options()})]
    content = json.loads(printed.out)
    assert content["tokens_identical"] is True
    for policy in ("mixed", "unmixed", "alternate"):
        for figure in ("worst_gap_ms", "ttft_ms", "total_ms"):
            assert content[f"{figure}_{policy}"] > 0
    assert [run["policy"] for run in content["runs"]] == list(turns(3))
    for run in content["runs"]:
        rows = sum(step["prefill_rows"] for step in run["steps"])
        assert rows == SCENARIO.arrival_length
        assert run["total_ms"] == pytest.approx(sum(step["ms"] for step in run["steps"]), abs=0.1)
        assert run["worst_gap_ms"] == max(max(gaps) for gaps in run["gaps_ms"].values())
    assert printed.err.count("worst gap") >= 9


def test_tables_show_every_policy(command, capsys):
    assert command()[0] == 0
    printed = capsys.readouterr().out
    assert "(64, 4, 6)" in printed
    for title in ("prefill first:", "alternate:", "mixed:", "tokens: identical"):
        assert title in printed


def test_live_table_follows_the_steps_on_a_terminal(comparison):
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=40)
    with live_run(console) as watch:
        run = comparison.run("prefill_first", watch)
    assert console.file.getvalue().count("waiting") > len(run.steps)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--repeat", "0"], "repeat is 0; allowed"),
        (["--requests", "0"], "requests is 0; allowed"),
    ],
)
def test_bad_sizes_are_one_line_before_anything_loads(capsys, flags, message):
    assert main(["demo", "--model", "absent", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"glm-jax demo: {message}")
    assert error.count("\n") == 1
