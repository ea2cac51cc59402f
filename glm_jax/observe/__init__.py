"""What a running engine tells of itself: step log, metrics, and why tokens came late. No JAX."""
