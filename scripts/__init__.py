"""Command line scripts of glm-jax; a package so that tests can import their parts."""
