import pytest

from bucketing.grid import Cell
from bucketing.step_inputs import Limits
from glm_jax.engine.config import EngineConfig, grid_options


def test_default_grid_is_p_0_64_512_by_g_0_1_8():
    grid = EngineConfig().grid()
    assert grid.prefill.edges == (0, 64, 512)
    assert grid.groups.edges == (0, 1, 8)
    assert len(grid.cells()) == 8


def test_the_budget_is_the_largest_bucket():
    assert EngineConfig(max_num_batched_tokens=64).grid().prefill.edges == (0, 64)
    assert EngineConfig(max_num_batched_tokens=317).grid().prefill.edges == (0, 64, 317)
    assert EngineConfig(max_num_batched_tokens=2048).grid().prefill.edges == (0, 64, 512, 2048)
    assert EngineConfig(max_num_batched_tokens=1).grid().prefill.edges == (0, 1)


def test_max_num_seqs_is_the_largest_group_bucket():
    assert EngineConfig(max_num_seqs=1).grid().groups.edges == (0, 1)
    assert EngineConfig(max_num_seqs=5).grid().groups.edges == (0, 1, 5)
    assert EngineConfig(max_num_seqs=32).grid().groups.edges == (0, 1, 8, 32)


def test_decode_widths_reach_the_grid():
    assert Cell(0, 8, 4) in EngineConfig(decode_widths=[1, 4]).grid().cells()


def test_limits_and_pool_size():
    config = EngineConfig(max_model_len=130, max_num_seqs=3, page_size=64)
    assert config.limits() == Limits(3, 3, 64)
    assert config.pool_pages == 10
    assert EngineConfig(num_pages=7).pool_pages == 7


def test_an_unknown_option_is_an_error_that_lists_the_allowed_ones():
    with pytest.raises(ValueError, match=r"unknown engine option 'max_num_seq'\. Did you mean "):
        EngineConfig(max_num_seq=3)
    with pytest.raises(
        ValueError,
        match=r"Allowed: decode_loop_steps, decode_path, .* step_policy, tbt_target_ms, waterm",
    ):
        EngineConfig(tensor_parallel_size=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 1}, "max_model_len is 1; allowed: an integer >= 2"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"page_size": 0}, "page_size is 0"),
        ({"num_pages": 1}, "num_pages is 1; allowed: an integer >= 2"),
        ({"watermark": 1.0}, "watermark is 1.0"),
        ({"latent_norm_eps": 0.0}, "latent_norm_eps is 0.0"),
        ({"step_policy": "decode_first"}, "'mixed', 'prefill_first', 'alternate'"),
        ({"dtype": "float16"}, "dtype is 'float16'; allowed: 'auto', 'float32', 'bfloat16'"),
        ({"kv_cache_dtype": "fp8"}, "allowed: 'auto', 'float32', 'bfloat16', 'fp8_ds_mla'"),
        ({"prefill_buckets": [-1]}, "prefill_buckets is"),
        ({"xla_flags": "xla_a=1"}, "xla_flags is 'xla_a=1'"),
        ({"xla_flags": ["=1"]}, 'allowed: a list of "name=value"'),
        ({"decode_widths": (4, 1)}, "decode widths"),
        ({"decode_widths": ()}, "decode widths"),
        ({"long_prefill_token_threshold": 63}, r"0 \(off\) or at least one page \(64 tokens\)"),
        ({"long_prefill_token_threshold_adaptive": True}, "which is 0"),
    ],
)
def test_a_bad_value_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_config_is_hashable_and_comparable():
    config = EngineConfig(prefill_buckets=[64])
    assert hash(config) == hash(EngineConfig(prefill_buckets=(64,)))
    assert config == EngineConfig(prefill_buckets=(64,))


def test_an_explicit_list_of_cells_is_the_grid():
    cells = [(0, 4, 1), (0, 8, 6), (64, 8, 6)]
    config = EngineConfig(grid_cells=cells, decode_widths=(1, 6), max_num_batched_tokens=64)
    assert config.grid().cells() == ((0, 4, 1), (0, 8, 6), (64, 8, 6))
    again = EngineConfig(**grid_options(config.grid()))
    assert again.grid() == config.grid()
    # A smaller list is a grid too: what it lacks is not compiled in advance.
    assert not EngineConfig(grid_cells=[(0, 1, 1)]).grid().complete


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid_cells": [(1024, 1, 1)]}, "outside of max_num_batched_tokens 512"),
        ({"grid_cells": [(64, 1, 6)]}, r"decode_widths \(1,\)"),
        ({"grid_cells": [(64, -1, 6)]}, "a cell of grid_cells"),
        ({"grid_cells": []}, "make no grid"),
        ({"max_step_ms": 0}, "max_step_ms is 0"),
        ({"max_step_ms": True}, "max_step_ms is True"),
    ],
)
def test_impossible_cells_and_times_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)
