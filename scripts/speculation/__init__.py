"""Parts of the benchmark of speculative decoding (``scripts.bench_speculation``)."""
