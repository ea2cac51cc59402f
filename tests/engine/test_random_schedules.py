"""Ten thousand random lives of the scheduler, every step checked by harness.Loop."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine.random_schedule import run_random_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
SCHEDULES = 10_000


@pytest.mark.slow
def test_random_schedules_hold_the_invariants():
    # In a child without the type-checking hook, which makes each of them six times slower.
    finished = subprocess.run(
        [sys.executable, "-m", "engine.random_schedule", "0", str(SCHEDULES)],
        cwd=ROOT / "tests",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    seen = json.loads(finished.stdout)
    # The draw must reach what it is meant to test.
    ends = ("stop", "length", "abort", "error")
    for rare in ("mixed", "preemptions", "pool resets", "rests as groups", *ends):
        assert seen[rare] >= SCHEDULES // 50, (rare, seen)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(10**6, 10**9))
def test_random_schedules_pass_type_checks(seed):
    run_random_schedule(seed)
