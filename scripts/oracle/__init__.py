"""What needs PyTorch and transformers: the reference that goldens and benchmarks compare with."""
