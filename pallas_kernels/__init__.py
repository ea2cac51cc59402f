"""Operators of the GLM-5 family, one folder each; usable without the rest of glm-jax."""
