"""Cache write: encode rows in a pool's format and store them in its pages, in place."""

from pallas_kernels.page_write.api import page_write

__all__ = ["page_write"]
