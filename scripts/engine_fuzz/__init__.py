"""Random lives of an engine with all that a request may ask for; see `scripts.fuzz_engine`."""
