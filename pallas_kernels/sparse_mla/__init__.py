"""Sparse multi-head latent attention over selected cache entries."""

from pallas_kernels.sparse_mla.api import sparse_mla

__all__ = ["sparse_mla"]
