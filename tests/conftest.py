"""What every test shares: one CPU-sized JAX set-up and a budget of XLA compilations."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jaxtyping
import pytest
from compile_counter import CompileCounter

from glm_jax import LLM
from scripts.fuzz_schedules import MODEL, OPTIONS

ROOT = Path(__file__).resolve().parents[1]
COMPILE_BUDGET = 150

# Tests never use the persistent compilation cache, whatever the product or the environment asks
# for: a warm cache would hide compilations from the budget, a stale one could hide a bug, and the
# suite would write to the user's cache folder. Tests of the cache itself run in a child process.
# (This switch wins over a cache folder set later.)
jax.config.update("jax_enable_compilation_cache", False)

_COUNTER = pytest.StashKey[CompileCounter]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_COUNTER] = CompileCounter().start()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_COUNTER].stop()


@pytest.fixture(scope="session")
def compile_counter(request: pytest.FixtureRequest) -> CompileCounter:
    """XLA compilations of the session so far."""
    return request.config.stash[_COUNTER]


@pytest.fixture(scope="session", autouse=True)
def _compile_budget(compile_counter: CompileCounter) -> Iterator[None]:
    yield
    if compile_counter.compiled > COMPILE_BUDGET:
        pytest.fail(
            f"the suite compiled {compile_counter.compiled} XLA programs, more than "
            f"{COMPILE_BUDGET}; share programs between tests (same cell, same config) or use "
            "NumPy for expected values"
        )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    counter = config.stash[_COUNTER]
    terminalreporter.write_line(
        f"XLA programs compiled: {counter.compiled} of at most {COMPILE_BUDGET} "
        f"({counter.children} of them in child processes), "
        f"and {counter.operators} single operators of EAGER steps"
    )


@pytest.fixture
def run_python(
    compile_counter: CompileCounter, tmp_path: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python ARGUMENTS...` in a child, on the CPU; its compilations count as the suite's.

    The persistent cache stays off unless the caller passes JAX_ENABLE_COMPILATION_CACHE.
    """

    def run(
        *arguments: str, timeout: float = 120, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        count_file = tmp_path / "compilations"
        count_file.unlink(missing_ok=True)
        wrapper = str(ROOT / "tests" / "compile_counter.py")
        finished = subprocess.run(
            [sys.executable, wrapper, str(count_file), *arguments],
            cwd=ROOT,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "JAX_ENABLE_COMPILATION_CACHE": "false",
                **environment,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if count_file.exists():
            compile_counter.children += int(count_file.read_text())
        return finished

    return run


@pytest.fixture(autouse=True)
def _slow_tests_skip_type_checks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checking types takes half the time of a thousand steps; other tests check the same calls."""
    slow = request.node.get_closest_marker("slow") is not None
    jaxtyping.config.update("jaxtyping_disable", slow)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def tiny_llm() -> LLM:
    """The golden checkpoint with an MTP layer, five drafts a step.

    Its five programs serve everything that needs a real model. Tests that want other limits or
    fewer drafts build an `Engine` of their own on `tiny_llm.runner`.
    """
    return LLM(MODEL, **OPTIONS)
