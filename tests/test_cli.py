"""The command line without a model: usage, errors, exit codes."""

import argparse
import json

import pytest

import glm_jax
from bucketing.axis import Axis
from bucketing.grid import Grid
from glm_jax import Logprob
from glm_jax.cli import main
from glm_jax.cli_flags import add_engine_flags, engine_options
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.outputs import StreamDelta


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "generate" in capsys.readouterr().out


def test_generate_reports_a_user_error_in_one_line(capsys, tmp_path):
    assert main(["generate", "hello", "--model", str(tmp_path / "absent")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("glm-jax generate: ")
    assert error.count("\n") == 1


def test_generate_refuses_an_unknown_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["generate", "hello", "--max-num-seq", "3"])
    assert ended.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


def test_generate_refuses_a_bad_sampling_value(capsys):
    assert main(["generate", "hello", "--top-p", "1.5"]) == 2
    assert "top_p is 1.5" in capsys.readouterr().err


class OneToken:
    """A model that generates one token for every prompt, without a tokenizer or with one."""

    tokenizer = None

    def __init__(self, model, **options) -> None:
        self.text = model

    def stream(self, prompts, params):
        best = {7: Logprob(-0.5, 1, self.text), 3: Logprob(-1.25, 2, self.text)}
        kept = dict(list(best.items())[: params.logprobs])
        yield 0, StreamDelta("r", "x", [7], "length", None, None, [kept])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--logprobs", "2"], "7 -0.500  3 -1.250"),
        (["--logprobs", "1", "--model", "x"], "'x' -0.500"),
    ],
)
def test_generate_prints_a_line_of_logprobs_per_token(capsys, monkeypatch, arguments, line):
    monkeypatch.setattr(glm_jax, "LLM", OneToken)
    assert main(["generate", "hello", *arguments]) == 0
    assert capsys.readouterr().out.splitlines()[0] == line


def test_step_log_reaches_the_model(monkeypatch, tmp_path, capsys):
    asked = []
    monkeypatch.setattr(
        glm_jax, "LLM", lambda model, **options: asked.append(options) or OneToken(model)
    )
    path = tmp_path / "steps.jsonl"
    assert main(["generate", "hello", "--logprobs", "1", "--step-log", str(path)]) == 0
    assert asked[0]["step_log"] == path
    capsys.readouterr()


def options_of(*arguments: str) -> dict:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return engine_options(parser.parse_args(arguments))


def test_axes_on_the_command_line_bound_the_step():
    options = options_of("--grid-prefill", "0,64,256", "--grid-decode", "0,1,4")
    grid = EngineConfig(**options).grid()
    assert grid.prefill.edges == (0, 64, 256)
    assert grid.groups.edges == (0, 1, 4)


def test_a_limit_given_beside_axes_wins():
    options = options_of("--grid-prefill", "64,256", "--max-num-batched-tokens", "128")
    assert EngineConfig(**options).grid().prefill.edges == (0, 64, 128)


def test_a_grid_file_gives_the_cells(tmp_path):
    grid = Grid(Axis("prefill rows", (0, 32)), Axis("groups", (0, 3)), (1, 2))
    (tmp_path / "grid.json").write_text(json.dumps(grid.as_json()))
    options = options_of("--grid", str(tmp_path / "grid.json"))
    assert EngineConfig(**options).grid().cells() == grid.cells()


def test_a_grid_file_and_axes_are_refused_together(tmp_path):
    with pytest.raises(ValueError, match="both give the cells"):
        options_of("--grid", str(tmp_path / "grid.json"), "--grid-decode", "1")


def test_sizes_that_are_none_are_refused(capsys):
    with pytest.raises(SystemExit):
        options_of("--grid-prefill", "64;256")
    assert "write integers with commas" in capsys.readouterr().err
