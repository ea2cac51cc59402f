"""Sparse multi-head latent attention over selected cache entries."""

from pallas_kernels.sparse_mla.api import Queries, sparse_mla_decode, sparse_mla_prefill
from pallas_kernels.sparse_mla.selection import Selection
from pallas_kernels.sparse_mla.up_projections import UpProjections

__all__ = ["Queries", "Selection", "UpProjections", "sparse_mla_decode", "sparse_mla_prefill"]
