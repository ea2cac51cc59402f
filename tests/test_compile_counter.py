"""The counter behind the suite's compile budget."""

import jax
import jax.numpy as jnp
import numpy as np
from compile_counter import CompileCounter

CACHED_CHILD = """
import jax, numpy as np
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.jit(lambda x: x * 3 + 1)(np.ones(5, np.float32)).block_until_ready()
"""


def test_counter_counts_each_program_once(compile_counter):
    other = CompileCounter().start()
    before = compile_counter.compiled
    double = jax.jit(lambda x: x * 2)
    double(np.ones(3, np.float32))
    double(np.zeros(3, np.float32))
    other.stop()
    double(np.ones(4, np.float32))
    assert other.compiled == 1
    assert compile_counter.compiled == before + 2


def test_counter_counts_ahead_of_time_programs(compile_counter):
    before = compile_counter.compiled
    lowered = jax.jit(lambda x: x - 1).lower(jax.ShapeDtypeStruct((7,), jnp.float32))
    assert compile_counter.compiled == before
    lowered.compile()
    assert compile_counter.compiled == before + 1


def test_suite_ignores_the_persistent_cache():
    assert not jax.config.jax_enable_compilation_cache


def test_children_count_and_cache_hits_do_not(run_python, compile_counter, tmp_path):
    script = tmp_path / "child.py"
    script.write_text(CACHED_CHILD)
    cache = {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
    }
    counts = []
    for _ in range(2):
        before = compile_counter.compiled
        finished = run_python(str(script), **cache)
        assert finished.returncode == 0, finished.stderr
        counts.append(compile_counter.compiled - before)
    assert counts == [1, 0]
