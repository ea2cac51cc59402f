"""Sizes of the GPU that the kernels are laid out for: an H200 (or H100 SXM)."""

# So many thread blocks are launched where each stays and takes tiles until none is left.
MULTIPROCESSORS = 132
