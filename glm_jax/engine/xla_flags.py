"""Compiler options that the step programs rely on, all in one place; host-only.

They are given to the compiler with each program, not through the environment, and are part of what
a stored program must match (``Lowering.description``).
"""

from collections.abc import Mapping, Sequence

# A step is one command buffer (a CUDA graph), launched at once: the operations that may be inside
# are spelt out. These are the defaults of jax 0.10 to 0.12, set here because a step relies on
# them: CUSTOM_CALL is our kernels, CONDITIONAL the sampler and the key selection.
GPU_FLAGS = (
    "xla_gpu_enable_command_buffer="
    "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL",
    # XLA would multiply by the joined matrices where two share their left side. Joining copies
    # them, in every step: 75 MB a layer at GLM-5.3's size.
    "xla_gpu_dot_merger_threshold_mb=0",
)


def platform_flags(platform: str) -> tuple[str, ...]:
    """The flags of a platform, "cpu" for example; "gpu" and "cuda" are one."""
    return GPU_FLAGS if platform in ("gpu", "cuda") else ()


def xla_options(flags: Sequence[str]) -> Mapping[str, str] | None:
    """What ``jax.jit`` takes as ``compiler_options``; None where there is nothing to set.

    Args:
        flags: "name=value" each.
    """
    return dict(flag.split("=", 1) for flag in flags) or None
