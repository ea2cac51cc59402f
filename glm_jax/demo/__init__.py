"""The ``glm-jax demo``: a long prompt arrives while others decode, under three step policies."""
