"""Lightning indexer: score every cached key of a request for a row, keep the best K positions."""

from pallas_kernels.index_topk.api import index_topk_decode, index_topk_prefill

__all__ = ["index_topk_decode", "index_topk_prefill"]
