"""Random lives of an engine with everything that a request may ask for; see `scripts.fuzz_engine`."""
