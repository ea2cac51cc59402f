"""What tests of the operators share: Mosaic's interpreter at one compilation a kernel."""

import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from compile_counter import CompileCounter
from jax._src.pallas.mosaic.interpret import thread_map


@pytest.fixture(scope="session")
def _compile_kernels_once() -> Iterator[None]:
    """Compile an interpreted kernel once.

    jax 0.10.2 compiles it again for every warpgroup of every thread block (about 2 s each), newer
    versions up to once a warpgroup.
    """
    lock = threading.Lock()
    compiled: dict[Any, Any] = {}

    def run(jaxpr: Any, constants: Any, *arguments: Any) -> None:
        def evaluate(constants: Any, *arguments: Any) -> None:
            jax.core.eval_jaxpr(jaxpr, constants, *arguments)

        with lock:
            if jaxpr not in compiled:
                compiled[jaxpr] = jax.jit(evaluate).lower(constants, *arguments).compile()
        compiled[jaxpr](constants, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thread_map, "_run_jaxpr", run)
        yield


@pytest.fixture
def mosaic_interpreter(
    _compile_kernels_once: None, compile_counter: CompileCounter
) -> Iterator[None]:
    """For tests that run a kernel in Mosaic's interpreter.

    It works through callbacks whose array operations JAX compiles one by one: counted as single
    operators, not as programs.
    """
    with compile_counter.single_operators():
        yield
