"""Stages and sums: what they read, how layouts and pads change them, what is refused."""

import math
from dataclasses import replace

import pytest

from bucketing.cell import Cell
from glm_jax.ledger.formats import make_formats
from glm_jax.ledger.hardware import HARDWARE
from glm_jax.ledger.layout import Layout, distinct_experts
from glm_jax.ledger.ledger import (
    FIRST_PASS,
    FULL,
    LATER_PASS,
    LAYER,
    SPARSE,
    STEP,
    make_ledger,
)
from glm_jax.ledger.probe import probe_cpu
from glm_jax.ledger.shape import ChunkShape, GroupShape, StepShape
from glm_jax.ledger.stage import Demand
from glm_jax.ledger.weights import model_size
from glm_jax.model.presets import PRESETS

GLM, TINY = PRESETS["glm-5.3"], PRESETS["tiny-random"]
H200 = HARDWARE["h200"]["attainable"]
NODE = Layout.parse("tp8ep8dp8")
MIXED = StepShape.of_load(prefill=8192, prefix=0, decode=32, drafts=5, context=131072)


def ledger_of(shape=MIXED, config=GLM, layout=NODE, **formats):
    return make_ledger(
        config, shape, formats=make_formats(config, **formats), hardware=H200, layout=layout
    )


def test_a_long_step_on_one_device_reads_every_weight():
    shape = StepShape(chunks=(ChunkShape(100_000),), new_drafts=5)
    ledger = ledger_of(shape, layout=Layout(), weights="bfloat16", cache="bfloat16")
    names = {
        "q, kv projections",
        "latent up-projections",
        "output projection",
        "indexer projections",
        "dense MLP",
        "router",
        "routed experts",
        "shared expert",
        "merge",
        "head",
    }
    layers = dict(ledger.times) | {LATER_PASS: 0}
    read = sum(
        layers[stage.part] * stage.demand.read for stage in ledger.stages if stage.name in names
    )
    # The router in float32, the head twice, embedding and norms not among these.
    router = 76 * (6144 + 1) * 256
    head = 154880 * 6144
    norms = 79 * (2 * 6144 + 2048 + 512) + 22 * 256 + 4 * 6144
    expected = 2 * (model_size(GLM).parameters - norms) + 2 * router
    assert read == pytest.approx(expected, rel=1e-9)
    assert head == GLM.vocab_size * GLM.hidden_size


def test_stages_stand_in_the_order_in_which_they_run():
    names = [
        stage.name for stage in ledger_of().stages if stage.part not in (FIRST_PASS, LATER_PASS)
    ]
    assert names == [
        "embedding",
        "q, kv projections",
        "latent write",
        "latent gather",
        "indexer projections",
        "index key write",
        "index key gather",
        "index scores",
        "top-k",
        "latent up-projections",
        "sparse MLA, chunks",
        "sparse MLA, groups",
        "output projection",
        "gather rows",
        "dense MLP",
        "scatter sums",
        "router",
        "dispatch",
        "routed experts",
        "shared expert",
        "combine",
        "head",
        "sampling",
    ]


def test_marks_say_what_is_shared_and_what_is_split():
    marks = {stage.name: stage.mark for stage in ledger_of().stages}
    assert marks["routed experts"] == "shared"
    assert marks["index scores"] == "split"
    assert marks["sparse MLA, chunks"] == "chunks"
    assert marks["sparse MLA, groups"] == "groups"
    alone = ledger_of(MIXED.decode_alone())
    assert alone.find(FULL, "index scores").mark == "groups"


def test_every_stage_says_how_it_is_counted():
    assert all(len(stage.formula) > 8 for stage in ledger_of().stages)


def test_sums_are_those_of_the_stages():
    ledger = ledger_of()
    operations = sum(ledger.times[one.part] * one.demand.operations for one in ledger.stages)
    assert ledger.total.demand.operations == pytest.approx(operations)
    assert sum(one.seconds for one in ledger.sums.values()) == pytest.approx(ledger.seconds)
    assert ledger.times == {
        STEP: 1,
        LAYER: 78,
        FULL: 21,
        "dense layer": 3,
        SPARSE: 75,
        FIRST_PASS: 1,
        LATER_PASS: 4,
    }


def test_the_mtp_layer_passes_once_over_all_rows_and_then_over_the_requests():
    ledger = ledger_of()
    assert ledger.find(FIRST_PASS, "routed experts").count == 8384
    assert ledger.find(LATER_PASS, "routed experts").count == 33
    assert ledger.find(FIRST_PASS, "head").count == ledger.find(LATER_PASS, "head").count == 33
    with pytest.raises(KeyError, match="no stage 'index scores' under 'MTP later pass'"):
        ledger.find(LATER_PASS, "index scores")


def test_models_that_do_not_share_the_selection_search_in_every_pass():
    ledger = ledger_of(config=PRESETS["glm-5"])
    assert ledger.times[FULL] == 78
    scores = ledger.find(LATER_PASS, "index scores")
    assert scores.count == 4 * 131073 + 8193
    assert ledger.find(LATER_PASS, "q, kv projections").count == 5


def test_a_step_without_drafts_has_no_mtp_stages():
    ledger = ledger_of(replace(MIXED, new_drafts=0))
    assert {stage.part for stage in ledger.stages}.isdisjoint({FIRST_PASS, LATER_PASS})


def test_one_device_exchanges_nothing_and_does_all_the_work():
    alone, node = ledger_of(layout=Layout()), ledger_of()
    assert alone.total.demand.sent == alone.total.floor.link == 0
    one, many = (ledger.total.demand.operations for ledger in (alone, node))
    # MTP's later passes do not spread evenly: 33 requests on 8 devices.
    assert one / many == pytest.approx(8, rel=1e-3)


def test_a_chunk_that_lives_on_one_rank_makes_it_the_busiest():
    split = ledger_of()
    one = ledger_of(layout=replace(NODE, split_chunks=False))
    assert one.find(LAYER, "q, kv projections").count == 8192 + 24
    assert split.find(LAYER, "q, kv projections").count == 1024 + 24
    assert one.seconds > 5 * split.seconds
    with pytest.raises(KeyError):
        one.find(LAYER, "latent gather")


def test_the_fullest_rank_counts():
    shape = StepShape(groups=(GroupShape(1000),) * 9)
    assert ledger_of(shape).find(LAYER, "latent write").count == 2


def test_gathering_rows_takes_the_place_of_dispatch_and_combine():
    ledger = ledger_of(layout=replace(NODE, exchange="gather"))
    names = [stage.name for stage in ledger.stages if stage.part == SPARSE]
    assert names == ["router", "gather rows", "routed experts", "shared expert", "scatter sums"]
    # bfloat16, as published: 103 MB of rows of which every device lacks 7/8.
    sent = ledger.find(SPARSE, "scatter sums").demand.sent
    assert sent == pytest.approx(103.02e6 * 7 / 8, rel=1e-3)


def test_heads_are_split_where_ranks_have_several_devices():
    few = ledger_of(layout=Layout.parse("tp8ep8dp2"))
    pure = ledger_of(layout=Layout.parse("tp8ep1dp1"))
    assert few.find(LAYER, "output projection").demand.sent > 0
    assert few.find(LAYER, "output projection").demand.read == pytest.approx(
        ledger_of().find(LAYER, "output projection").demand.read / 4
    )
    # Every device has every row: nothing to gather, and sums go to all.
    assert pure.find(SPARSE, "gather rows").demand.sent == 0
    assert pure.find(LAYER, "q, kv projections").count == 8384


def test_pads_cost_where_every_row_is_computed_and_nothing_in_attention():
    shape = replace(MIXED.decode_alone(), cell=Cell(0, 64, 6), new_drafts=0)
    padded, useful = ledger_of(shape), ledger_of(replace(shape, cell=None))
    assert padded.find(LAYER, "q, kv projections").count == 48
    assert padded.find(STEP, "head").count == 384
    for part, name in (
        (LAYER, "sparse MLA, groups"),
        (FULL, "index scores"),
        (SPARSE, "routed experts"),
        (LAYER, "latent write"),
    ):
        assert padded.find(part, name).demand == useful.find(part, name).demand


def test_more_rows_never_cost_less():
    floors = [
        ledger_of(
            StepShape.of_load(prefill=rows, prefix=0, decode=8, drafts=5, context=8192)
        ).seconds
        for rows in (0, 64, 512, 4096)
    ]
    assert floors == sorted(floors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunks": (), "groups": ()}, "the step has no rows"),
        ({"chunks": (ChunkShape(0),)}, "is no chunk"),
        ({"groups": (GroupShape(4, 1, 5),)}, "the context holds them all"),
        ({"new_drafts": -1}, "new_drafts is -1"),
        ({"cell": Cell(4096, 32, 6)}, "do not fit"),
    ],
)
def test_shapes_refuse_what_is_no_step(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(MIXED, **changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8x8", "allowed: one, or a name like tp8ep8dp8"),
        ("tp8ep4dp8", "ep is 4 of 8 devices"),
        ("tp8ep8dp3", "does not divide tp 8"),
    ],
)
def test_layouts_refuse_what_is_none(text, message):
    with pytest.raises(ValueError, match=message):
        Layout.parse(text)


def test_layout_names_survive():
    assert [str(Layout.parse(name)) for name in ("one", "tp8ep8dp8")] == ["one", "tp8ep8dp8"]
    with pytest.raises(ValueError, match="exchange is 'ring'"):
        Layout(exchange="ring")


def test_ledger_refuses_drafts_without_a_drafter_and_uneven_experts():
    bare = GLM.replace(num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match="no MTP layer to draft with"):
        ledger_of(config=bare)
    with pytest.raises(ValueError, match="does not divide the 256 routed experts"):
        ledger_of(layout=Layout(6, 6, 6))


def test_rows_spread_over_experts_and_devices():
    assert distinct_experts(256, 8, 192) == pytest.approx(255.42, rel=1e-4)
    assert distinct_experts(256, 8, 32) == pytest.approx(163.31, rel=1e-4)
    others = math.comb(224, 8) / math.comb(256, 8)
    assert (
        NODE.devices_of_row(256, 8)
        == pytest.approx(8 * (1 - others))
        == pytest.approx(5.29, abs=0.01)
    )


@pytest.mark.parametrize("name", HARDWARE)
def test_every_rate_of_a_device_has_a_source(name):
    for rates in HARDWARE[name].values():
        numbers = {field for field in rates._fields if field not in ("name", "sources")}
        assert set(rates.sources) == numbers
        assert all(getattr(rates, field) > 0 for field in numbers)
    attainable, specified = (HARDWARE[name][key] for key in ("attainable", "specified"))
    assert attainable.memory / specified.memory == pytest.approx(4.3 / 4.8)
    assert attainable.bf16 / specified.bf16 == pytest.approx(790 / 990)


def test_floors_of_this_cpu_come_from_a_probe():
    cpu = probe_cpu()
    assert cpu.float32 > 1e8
    assert 1e8 < cpu.memory <= cpu.cache
    shape = StepShape.of_load(prefill=64, prefix=0, decode=4, drafts=0, context=100)
    formats = make_formats(TINY, weights="float32", cache="float32")
    ledger = make_ledger(TINY, shape, formats=formats, hardware=cpu)
    assert 0 < ledger.seconds < 1


def test_demands_add_and_repeat():
    one = Demand(operations=2, read=3)
    assert one + one == one * 2 == Demand(operations=4, read=6)
