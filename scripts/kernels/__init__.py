"""Operator calls at the sizes that matter: what bench_kernels and tune_kernels are made of."""
