"""How fast a start is when its programs are stored, against one that compiles them all.

`python -m scripts.bench_start [--model FOLDER] [--repeat 3] [--json]`. Every start is a fresh
process with its own cache folder, empty for a cold one. Cold and warm: the default grid of `LLM`,
from the start of the process until it could take a request. First token: `glm-jax generate` with
a filled cache, from the start of the process to the first character on its output.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Printed by the child: where the seconds of a start went, as far as it can tell.
START = """
import time
born = time.perf_counter()
import json, sys
import glm_jax
glm_jax.LLM
imported = time.perf_counter()
model, options = json.loads(sys.argv[1])
llm = glm_jax.LLM(model, **options)
ready = time.perf_counter()
reports = llm.runner.programs.reports.values()
print(json.dumps({
    "import_s": imported - born,
    "llm_s": ready - imported,
    "programs": len(reports),
    "compiled": sum(report.source == "compiled" for report in reports),
    "stored_mb": sum(report.stored_bytes for report in reports) / 1e6,
}), flush=True)
"""
# The whole default grid, waited for.
WHOLE_GRID = {"grid_warm": "all"}
PROMPT = "def fib(n):"


def environment(home: Path) -> dict[str, str]:
    """The caller's, with a cache folder of its own."""
    mine = {**os.environ, "HOME": str(home), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    mine.pop("JAX_COMPILATION_CACHE_DIR", None)
    return mine


def start(home: Path, model: str | None, options: dict[str, Any]) -> dict[str, float]:
    """Start an LLM in a fresh process; its seconds and what it compiled."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", START, json.dumps([model, options])],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(home),
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    total = time.perf_counter() - began
    if process.wait() != 0:
        raise SystemExit("a start failed; run `python -c 'import glm_jax; glm_jax.LLM()'`")
    return {"total_s": total, **json.loads(line)}


def first_token(home: Path, model: str | None) -> float:
    """Seconds until `glm-jax generate` prints its first character."""
    command = [sys.executable, "-c", "from glm_jax.cli import main; raise SystemExit(main())"]
    command += ["generate", PROMPT, "--max-tokens", "4", "--ignore-eos"]
    command += ["--model", model] if model else []
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(home)
    )
    assert process.stdout is not None
    process.stdout.read(1)
    seconds = time.perf_counter() - began
    process.stdout.read()
    if process.wait() != 0:
        raise SystemExit("`glm-jax generate` failed")
    return seconds


def measure(model: str | None, repeat: int) -> dict[str, Any]:
    """One cold start, then warm ones; a first `generate` fills the cache for the others."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        cold = start(home, model, WHOLE_GRID)
        warm = [start(home, model, WHOLE_GRID) for _ in range(repeat)]
        first_ever = first_token(home, model)
        firsts = [first_token(home, model) for _ in range(repeat)]
    warm_s = statistics.median(run["total_s"] for run in warm)
    return {
        "model": model or "embedded",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "cold_s": cold["total_s"],
        "warm_s": warm_s,
        "warm_over_cold": warm_s / cold["total_s"],
        "first_token_cold_s": first_ever,
        "first_token_warm_s": statistics.median(firsts),
        "first_token_warm_all_s": firsts,
        "cold": cold,
        "warm": warm,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="checkpoint folder; default: embedded")
    parser.add_argument("--repeat", type=int, default=3, help="warm starts of each kind")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    arguments = parser.parse_args()
    result = measure(arguments.model, arguments.repeat)
    if arguments.json:
        print(json.dumps(result))
        return
    cold, warm = result["cold"], result["warm"][0]
    print(f"{result['model']}, {cold['programs']} programs, {result['cores']} cores")
    print(f"  cold start    {result['cold_s']:7.2f} s   {cold['compiled']} compiled")
    print(f"  warm start    {result['warm_s']:7.2f} s   {warm['compiled']} compiled")
    print(f"  warm / cold   {result['warm_over_cold']:7.3f}")
    print(f"  glm-jax generate, first token, cache empty {result['first_token_cold_s']:7.2f} s")
    print(f"  glm-jax generate, first token, cache full  {result['first_token_warm_s']:7.2f} s")


if __name__ == "__main__":
    main()
