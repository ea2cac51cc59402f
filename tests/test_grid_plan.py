import argparse
import json

import pytest

from bucketing.grid import Grid
from glm_jax.engine.config import EngineConfig, grid_options
from glm_jax.grid_plan import Limits, add_arguments, read_log, run
from glm_jax.simulate.traces import AZURE_CODE, generate

SMALL = ["--budget", "512", "--max-num-seqs", "8", "--draft", "2", "--programs", "12"]


def plan(*arguments) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([*SMALL, *map(str, arguments)]))


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = (
        {
            "timestamp": 1e3 * arrival.time,
            "input_length": min(arrival.prompt, 900),
            "output_length": arrival.output,
        }
        for arrival in generate(AZURE_CODE, 24)
    )
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "steps.jsonl"
    row = {"prefill_rows": 100, "decode_rows": 6, "groups": 2, "width": 3, "pairs": 500}
    path.write_text("\n".join([json.dumps(row)] * 10))
    return path


def test_a_trace_gives_a_grid_file_that_the_engine_reads(trace, tmp_path, capsys):
    output = tmp_path / "grid.json"
    assert plan("--trace", trace, "--acceptance", 2, "--output", output) == 0
    printed = capsys.readouterr().out
    assert "waste:" in printed
    assert "time to first token" in printed
    grid = Grid.from_json(json.loads(output.read_text()))
    assert len(grid.cells()) <= 12
    assert grid.complete
    config = EngineConfig(**grid_options(grid))
    assert config.grid().cells() == grid.cells()
    assert config.max_num_batched_tokens == 512


def test_json_stands_alone(log, capsys):
    assert plan("--steps", log, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 5
    assert summary["programs"] == len(summary["grid"]["cells"]) <= 12
    assert 0 <= summary["waste_time"] < 0.05
    (cell,) = summary["cells"]
    assert cell["cell"] == [104, 2, 3] or cell["cell"][0] >= 100


def test_a_log_needs_its_fields(log, tmp_path):
    assert len(read_log(log)) == 10
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prefill_rows": 1}\n')
    with pytest.raises(ValueError, match=r"line 1 of step log .* is no step"):
        read_log(broken)


def test_widths_follow_the_drafts():
    assert Limits(drafts=5).widths == (1, 6)
    assert Limits(drafts=0).widths == (1,)
