"""Model-free buckets: sizes, cells, the arrays of a step and the programs compiled for them.

The modules axis, grid, step_inputs and pack are host-only: importing them does not import JAX.
"""
