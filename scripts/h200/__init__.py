"""Compiling for an H200 on a machine without one: what `scripts.compile_h200` is made of."""
