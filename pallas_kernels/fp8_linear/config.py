"""How fp8_linear's GPU kernel cuts up its work."""

from pallas_kernels.mosaic.hopper import MULTIPROCESSORS


def split_count(items: int, steps: int) -> int:
    """Into how many parts the depth is cut, a divisor of ``steps``.

    As few as give half of the multiprocessors something to do: so many take all that L2 delivers,
    and each part's result goes through memory in float32.
    """
    divisors = (parts for parts in range(1, steps + 1) if steps % parts == 0)
    return next((parts for parts in divisors if 2 * items * parts >= MULTIPROCESSORS), steps)
