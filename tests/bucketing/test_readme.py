"""The example of bucketing's README runs as it stands there, and knows no model."""

import re
from pathlib import Path

import numpy as np
import pytest

README = Path(__file__).resolve().parents[2] / "bucketing" / "README.md"
MOST_LINES = 32


@pytest.fixture(scope="module")
def example() -> str:
    (found,) = re.findall(r"<!-- example: .*?-->\n```python\n(.*?)```", README.read_text(), re.S)
    return found


def test_the_example_is_short(example):
    assert len([line for line in example.splitlines() if line.strip()]) <= MOST_LINES


def test_the_example_serves_a_mixed_step_by_one_program(example):
    names: dict = {}
    exec(compile(example, str(README), "exec"), names)
    # Five rows: four fill a bucket, the fifth follows; one group is padded to two.
    assert tuple(names["cell"]) == (4, 2, 1)
    expected = [[1.0] * 3] * 4 + [[2.0] * 3, [0.0] * 3]
    np.testing.assert_array_equal(names["result"], expected)
