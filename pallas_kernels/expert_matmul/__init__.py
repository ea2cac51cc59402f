"""Mixture-of-experts feed-forward over the rows routed to each expert."""

from pallas_kernels.expert_matmul.api import expert_matmul
from pallas_kernels.expert_matmul.weights import ExpertWeights

__all__ = ["ExpertWeights", "expert_matmul"]
