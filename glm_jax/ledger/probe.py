"""What this CPU can do, measured in about a second: a float32 product and a copy."""

import time
from collections.abc import Callable

import numpy as np

from glm_jax.ledger.hardware import Hardware

_SIDE = 1024  # of the matrices: 4 MB each, long enough for all cores
_LARGE = 64 << 20  # bytes of a copy: beyond the caches
_SMALL = 256 << 10  # bytes of a copy that stays in a core's cache
_REPEATS = 5


def probe_cpu() -> Hardware:
    """Measure float32 products and copies with NumPy, the best of a few runs each.

    A copy counts its bytes twice, read and written. There is no faster narrow type on a CPU: e4m3
    and bfloat16 are widened, so their rates are float32's. A single device has no link.
    """
    left = np.ones((_SIDE, _SIDE), np.float32)
    out = np.empty_like(left)
    product = 2 * _SIDE**3 / _best(lambda: np.matmul(left, left, out=out))
    large, small = (_copy_rate(size) for size in (_LARGE, _SMALL))
    measured = "measured with NumPy on this machine"
    return Hardware(
        name="this cpu",
        memory=large,
        cache=max(large, small),
        cache_bytes=float(_SMALL),
        fp8=product,
        bf16=product,
        float32=product,
        link=float("inf"),
        collective=0.0,
        capacity=0.0,
        sources={
            **dict.fromkeys(("memory", "cache", "float32"), measured),
            **dict.fromkeys(("fp8", "bf16"), "as float32: narrow types are widened"),
            "cache_bytes": "size of the small copy",
            "capacity": "not asked",
            "link": "one device",
            "collective": "one device",
        },
    )


def _copy_rate(size: int) -> float:
    source = np.ones(size, np.uint8)
    target = np.empty_like(source)
    return 2 * size / _best(lambda: np.copyto(target, source))


def _best(call: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs, after one that warms up."""
    call()
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
