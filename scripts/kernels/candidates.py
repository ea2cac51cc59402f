"""Other ways in which the GPU kernels can cut the work of a problem than the one they choose."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from pallas_kernels.expert_matmul import config as expert_config
from pallas_kernels.expert_matmul import mosaic_gpu as expert_kernel
from pallas_kernels.formats import format_of
from pallas_kernels.index_topk import mosaic_gpu as index_kernel
from pallas_kernels.index_topk import mosaic_gpu_scores, tile_shape
from pallas_kernels.mosaic.fp8_product import TILE_SIZES
from pallas_kernels.mosaic.hopper import MULTIPROCESSORS
from pallas_kernels.mosaic.largest import padded_length
from pallas_kernels.pool import PagedPool
from pallas_kernels.sparse_mla import config as mla_config
from pallas_kernels.sparse_mla import mosaic_gpu as mla_kernel
from scripts.kernels.expert_matmul import ExpertMatmul
from scripts.kernels.index_topk import WIDTH, IndexTopk
from scripts.kernels.pools import PAGE_SIZE
from scripts.kernels.problem import Problem
from scripts.kernels.sparse_mla import SparseMla

_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
# Programs of the scoring kernel, in waves of one per multiprocessor.
_WAVES = (1, 2, 3, 4)
# A narrower wgmma reads as many keys for less work.
_LEAST_COLUMNS = 64
# At most that many columns of weights in a tile, and stages. A stage takes 8 KiB and 8 KiB for
# every 64 columns, at least 128 of them for gate and up; with the result 227 KiB in all.
_EXPERT_TILES = ((256, 3), (256, 4), (128, 4), (128, 6), (128, 8), (64, 6), (64, 8))


class Candidate(NamedTuple):
    """One way.

    Attributes:
        name: the numbers that are tried.
        call: takes the problem's inputs.
        by_rule: whether the kernel cuts like that when nothing is named.
    """

    name: str
    call: Callable[..., Any]
    by_rule: bool


def candidates_of(problem: Problem) -> list[Candidate]:
    """The ways to try; none where there is nothing to choose.

    A prefill of sparse_mla has a thread block for each of its many rows and splits none.
    """
    if isinstance(problem, SparseMla) and problem.segment == "decode":
        return _share_counts(problem)
    if isinstance(problem, IndexTopk):
        return _score_cuts(problem)
    if isinstance(problem, ExpertMatmul):
        return _fp8_rows(problem) if problem.weights == "fp8" else _expert_tiles(problem)
    return []


def _share_counts(problem: SparseMla) -> list[Candidate]:
    """Thread blocks per row."""
    rule = mla_config.splits_for(problem.requests * problem.rows, problem.topk)
    blocks = problem.topk // mla_config.KEYS_PER_BLOCK
    attend = functools.partial(mla_kernel.attend_rows, **problem.settings)
    return [
        Candidate(f"{splits} splits", functools.partial(attend, splits=splits), splits == rule)
        for splits in sorted({*_SPLITS, rule})
        if splits <= blocks
    ]


def _score_cuts(problem: IndexTopk) -> list[Candidate]:
    """Rows per tile by the rule's number of programs, and programs by the rule's rows."""
    function = getattr(index_kernel, problem.function)
    search = functools.partial(function, **problem.settings)
    size = format_of(problem.keys).entry_size(WIDTH)
    page = np.zeros((1, 1, PAGE_SIZE, size), format_of(problem.keys).storage)
    keys = PagedPool(jax.device_put(page), 0, problem.keys)
    rows = problem.rows if problem.segment == "decode" else problem.tile_rows
    most = tile_shape.most_rows(problem.heads, keys)
    few = tile_shape.rows_per_tile(rows, problem.heads, keys)
    widths = {
        size
        for size in range(1, most + 1)
        if rows % size == 0 and size * problem.heads >= _LEAST_COLUMNS
    }
    rule = tile_shape.Cut(few, mosaic_gpu_scores.split_count(_tiles(problem, few), problem.context))
    cuts = {rule, *(tile_shape.Cut(size, _rule_splits(problem, size)) for size in widths)}
    blocks = problem.context // tile_shape.BLOCK
    for waves in _WAVES:
        programs = waves * MULTIPROCESSORS // _tiles(problem, few)
        cuts.add(tile_shape.Cut(few, max(1, min(blocks, programs))))
    return [
        Candidate(
            f"{cut.rows} rows, {cut.splits} splits", functools.partial(search, cut=cut), cut == rule
        )
        for cut in sorted(cuts)
    ]


def _rule_splits(problem: IndexTopk, rows: int) -> int:
    return mosaic_gpu_scores.split_count(_tiles(problem, rows), problem.context)


def _tiles(problem: IndexTopk, rows: int) -> int:
    """Tiles that are scored in one launch."""
    buffered = index_kernel.SCORES // (padded_length(problem.context) * rows)
    return max(1, min(problem.requests * -(-problem.rows // rows), buffered))


def _expert_tiles(problem: ExpertMatmul) -> list[Candidate]:
    """Columns of weights in a tile, at most, and stages of the pipeline."""
    tried: dict[tuple[expert_config.Tile, ...], Candidate] = {}
    rule = _tiles_of(problem, expert_config.BY_RULE)
    for columns, stages in _EXPERT_TILES:
        cut = expert_config.Cut(columns=columns, stages=stages)
        tiles = _tiles_of(problem, cut)
        name = f"{tiles[0].columns} and {tiles[1].columns} columns, {stages} stages"
        tried[tiles] = Candidate(name, _multiply(cut), tiles == rule)
    return list(tried.values())


def _tiles_of(problem: ExpertMatmul, cut: expert_config.Cut) -> tuple[expert_config.Tile, ...]:
    rule = expert_config.tile_for
    return rule(problem.width, 2, cut), rule(problem.model, 1, cut)


def _fp8_rows(problem: ExpertMatmul) -> list[Candidate]:
    """Rows of a tile."""
    rule = expert_config.fp8_tile_size(problem.rows * problem.choices, problem.experts)
    return [
        Candidate(f"{size} rows", _multiply(expert_config.Cut(fp8_rows=size)), size == rule)
        for size in TILE_SIZES
    ]


def _multiply(cut: expert_config.Cut) -> Callable[..., Array]:
    return functools.partial(expert_kernel.expert_matmul, cut=cut)
