"""Steps at long contexts, sparse and dense: what `scripts.bench_context` is made of."""
