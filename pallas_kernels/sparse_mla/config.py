"""How the GPU kernel of sparse_mla cuts its work."""

from pallas_kernels.mosaic.hopper import MULTIPROCESSORS

KEYS_PER_BLOCK = 64
# Prompt rows whose latent queries and mixtures are in memory together: 64 heads of 512 values in
# float32, twice, and in bfloat16, are 671 MB for 2048 rows.
ROWS_AT_ONCE = 2048
# What a thread block costs besides its keys, in blocks of 64 keys of 1152 bytes (73,728): reading
# its queries (73,728 bytes), writing its result (131,072); and, if a row is split, reading the
# results again to merge them.
_BLOCKS_ALONE = 3
_BLOCKS_SPLIT = 5


def splits_for(rows: int, topk: int) -> int:
    """Thread blocks per row, so that the multiprocessors end together.

    One thread block fills a multiprocessor (221 KiB of shared memory), so the time is the number
    of waves times the length of one.
    """
    blocks = -(-topk // KEYS_PER_BLOCK)

    def time(splits: int) -> int:
        waves = -(-rows * splits // MULTIPROCESSORS)
        return waves * (-(-blocks // splits) + (_BLOCKS_SPLIT if splits > 1 else _BLOCKS_ALONE))

    return min(range(1, blocks + 1), key=time)
