"""Mixture-of-experts feed-forward over the rows routed to each expert."""

from pallas_kernels.expert_matmul.api import expert_matmul

__all__ = ["expert_matmul"]
