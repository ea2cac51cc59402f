"""Puts each bug of the catalogue into a copy of the repository: its test must fail there.

`python -m scripts.mutate [--entries 1 2 64]` runs all tests of ``scripts.mutations`` once as they
are, then each of them with its mutation. Prints a line per mutation; fails where a test survives,
or where the text that a mutation replaces is not in its file exactly once.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from scripts.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider")
# What pytest returns where a test failed.
FAILED = 1


def copy_repository(target: Path) -> None:
    """Copy tracked and new files."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / name)


def run_tests(folder: Path, tests: Iterable[str]) -> tuple[int, str]:
    """Run tests in a copy; returns pytest's code and the last lines that it printed."""
    finished = subprocess.run(
        [sys.executable, *PYTEST, *tests],
        cwd=folder,
        # A bytecode file of the same second and size as a mutated source would be taken for it;
        # wide lines, so that pytest's summary holds the reason.
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = (finished.stdout + finished.stderr).strip().splitlines()
    return finished.returncode, "\n".join(said[-15:])


def outcome(folder: Path, mutation: Mutation) -> tuple[str, str]:
    """Run a mutation's test with it; returns what became of it, and what to print of it."""
    path = folder / mutation.path
    text = path.read_text()
    if text.count(mutation.old) != 1:
        return "does not apply", f"{mutation.path} has it {text.count(mutation.old)} times"
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        code, said = run_tests(folder, [mutation.test])
    finally:
        path.write_text(text)
    if code == FAILED:
        return "failed as it should", failure_in(said)
    return ("survived" if code == 0 else f"pytest ended with {code}"), said


def failure_in(said: str) -> str:
    """What pytest's summary says of the failure, to be judged by a reader."""
    lines = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    _, _, reason = (lines or [""])[0].partition(" - ")
    return f"     {reason[:120]}" if reason else ""


def check(mutations: Sequence[Mutation]) -> bool:
    """Run mutations in a copy; returns whether every test failed as it should."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_repository(folder)
        started = time.perf_counter()
        code, said = run_tests(folder, dict.fromkeys(one.test for one in mutations))
        if code:
            print(f"the tests do not pass as they are:\n{said}")
            return False
        print(f"as they are, all tests pass ({time.perf_counter() - started:.0f} s)", flush=True)
        sound = True
        for mutation in mutations:
            started = time.perf_counter()
            result, said = outcome(folder, mutation)
            seconds = time.perf_counter() - started
            sound &= result == "failed as it should"
            test = mutation.test.rsplit("::", 1)[-1]
            print(f"{mutation.entry:3d}  {result} ({seconds:.0f} s)  {mutation.why}  [{test}]")
            if said:
                print(said)
            sys.stdout.flush()
    return sound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, nargs="+", help="of the catalogue; default: all")
    arguments = parser.parse_args()
    chosen = [
        one
        for one in MUTATIONS
        if arguments.entries in (None, []) or one.entry in arguments.entries
    ]
    if not chosen:
        raise SystemExit(
            f"no mutation of {arguments.entries}; there are: {[one.entry for one in MUTATIONS]}"
        )
    started = time.perf_counter()
    sound = check(chosen)
    minutes = (time.perf_counter() - started) / 60
    print(f"{len(chosen)} mutations, {minutes:.1f} minutes, {'sound' if sound else 'NOT sound'}")
    raise SystemExit(not sound)


if __name__ == "__main__":
    main()
