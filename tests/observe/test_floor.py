"""The ledger's view of a logged step."""

import pytest
from engine.fake_executor import Story
from observe.planted_log import PlantedLog

from bucketing.cell import Cell
from glm_jax.engine.config import EngineConfig
from glm_jax.ledger.formats import make_formats
from glm_jax.ledger.hardware import HARDWARE
from glm_jax.ledger.ledger import make_ledger
from glm_jax.ledger.shape import ChunkShape, GroupShape, StepShape
from glm_jax.model.presets import PRESETS
from glm_jax.observe.floor import StepFloor, step_shape
from glm_jax.observe.log_header import header_now

H200 = HARDWARE["h200"]["attainable"]
MODEL = PRESETS["glm-5.3"]
# Eight groups of a planted log are in an engine of as many slots.
OPTIONS = EngineConfig(dtype="bfloat16", weight_dtype="fp8", kv_cache_dtype="fp8_ds_mla")


def test_a_mixed_step_is_its_chunks_and_groups():
    options = {"max_num_batched_tokens": 4, "group_buckets": (2,)}
    story = Story(**options, num_speculative_tokens=2)
    story.add("decodes", [1, 2, 3], max_tokens=20)
    story.step()
    story.add("prompt", list(range(6)), max_tokens=1)
    first, last = (step_shape(story.step().record, 3) for _ in range(2))
    assert first.chunks == (ChunkShape(4, 0, sampled=False),)
    # A prompt's rest of two rows fits a group of three.
    assert [group.known for group in last.groups] == [1, 2]
    assert first.groups[0].context == 3 + first.groups[0].rows
    assert last.groups[1].context == 6


def test_the_floor_is_that_of_the_ledger():
    log = PlantedLog(0, requests=2)
    log.lengths = {"r0": 1000, "r1": 3000}
    log.chunks()
    floor = StepFloor(header_now(OPTIONS, MODEL, "gpu"), H200)
    shape = StepShape(
        chunks=(ChunkShape(64, 0, sampled=False),),
        groups=(GroupShape(1001), GroupShape(3001)),
        cell=Cell(64, 8, 1),
        max_num_seqs=8,
    )
    formats = make_formats(MODEL, weights="fp8", cache="fp8_ds_mla")
    expected = make_ledger(MODEL, shape, formats=formats, hardware=H200).seconds
    assert floor.seconds(log.last) == pytest.approx(expected)


def test_a_log_without_its_model_has_no_floor():
    with pytest.raises(ValueError, match="does not name its model"):
        StepFloor(header_now(OPTIONS), H200)
