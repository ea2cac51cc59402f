"""`glm-jax plan`: its figures are those of the model's published sizes; nothing is compiled."""

import json

import jax
import pytest

from bucketing.cell import Cell
from bucketing.programs import CompileReport
from glm_jax.cli import main
from glm_jax.deployment import program_peak
from glm_jax.deployment.deployment import Deployment
from glm_jax.deployment.plan import ProgramNeed, make_plan
from glm_jax.deployment.weight_bytes import weight_parts
from glm_jax.model.presets import PRESETS
from glm_jax.model.storage import abstract_model, split_model

GLM = PRESETS["glm-5.3"]
UNKNOWN = ProgramNeed({}, "unknown")


def plan_of(program=UNKNOWN, **options):
    return make_plan(Deployment(config=GLM, **options), program)


def test_weights_are_those_of_the_published_checkpoint():
    parts = weight_parts(GLM, "fp8")
    assert sum(part.elements for part in parts) == 753_329_940_480
    assert sum(part.stored for part in parts) == 755_617_140_416


def test_a_gpu_of_eight_holds_its_experts_and_all_attention():
    hidden, heads, expert = 6144, 64, 3 * 6144 * 2048
    kv_b = 512 * heads * (192 + 256)
    attention = hidden * 2048 + hidden * 576 + 2048 * heads * 256 + kv_b + heads * 256 * hidden
    indexer = 2048 * 32 * 128 + hidden * 128 + hidden * 32
    split = 76 * 257 * expert + 3 * 3 * hidden * 12288 + 2 * 2 * 154880 * hidden
    expected = 79 * attention + 22 * indexer + split / 8
    plan = plan_of()
    # 106.0 GB; the scales add 4 bytes to every 128 x 128.
    assert 105.9e9 < expected < plan.matrix_bytes < expected * (1 + 4 / 128**2) + 1e7 < 106.05e9
    # All the rest: routers of 256 x 6144 in bfloat16, MTP's merge, norms.
    rest = 2 * (76 * 256 * hidden + 2 * hidden * hidden)
    assert plan.stored_weight_bytes - plan.matrix_bytes == pytest.approx(rest, rel=0.01)
    # In memory kv_b is bfloat16 and routers are float32.
    more = 79 * kv_b + 2 * 76 * 256 * hidden
    assert plan.weight_bytes - plan.stored_weight_bytes == pytest.approx(more, rel=1e-3)


def test_only_experts_split_takes_more():
    others = 753_329_940_480 - 76 * 256 * 3 * 6144 * 2048
    assert plan_of().copied_weight_bytes > 734_439_407_616 / 8 + others


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_unquantised_weights_have_one_size_but_for_routers(dtype, size):
    parts = {part.name: part for part in weight_parts(GLM, dtype)}
    assert parts["routed experts"].held == size * parts["routed experts"].elements
    assert parts["kv_b (k_up, v_up)"].held == size * parts["kv_b (k_up, v_up)"].elements
    assert sum(part.stored for part in parts.values()) == pytest.approx(2 * 753.33e9, rel=1e-5)


@pytest.mark.parametrize("dtype", ["fp8", "bfloat16", "float32"])
def test_weights_take_what_the_model_is_laid_out_with(dtype):
    plain = "bfloat16" if dtype == "fp8" else dtype
    model = abstract_model(GLM, dtype=plain, storage="stacked", weight_dtype=dtype)
    leaves = split_model(model)[1]
    laid_out = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert sum(part.held for part in weight_parts(GLM, dtype)) == laid_out


def test_a_token_takes_the_published_bytes_with_and_without_mtp():
    plan, wide = plan_of(), plan_of(kv_cache_dtype="bfloat16")
    assert plan.token_bytes(mtp=False) == 656 * 78 + 132 * 21 == 53_940
    assert plan.token_bytes(mtp=True) == 53_940 + 656 + 132
    assert wide.token_bytes(mtp=False) == 2 * (576 * 78 + 128 * 21)


def test_32_requests_of_128k_nearly_fill_the_gpus():
    plan = plan_of()
    assert plan.load_bytes(mtp=False) == 4 * 131072 * 53_940  # 28.3 GB
    assert (plan.matrix_bytes + plan.load_bytes(mtp=False)) / 1e9 == pytest.approx(134.2, abs=0.1)
    assert 0.96 < plan.used_share < 0.97
    assert plan.seqs_that_fit == 32


def test_pages_are_what_weights_and_the_hungriest_step_leave():
    plan = plan_of(ProgramNeed({"decode": 1 << 20, "mixed": 3 << 30}, "given"))
    page = 64 * 54_728
    assert plan.pages == (141 * 10**9 - plan.weight_bytes - (3 << 30)) // page
    assert plan.needed_pages == 4 * 2048 + 1
    assert plan.seqs_that_fit == 8 * ((plan.pages - 1) // 2048)


def test_what_does_not_fit_has_no_pages():
    plan = plan_of(gpus=1)
    assert plan.free_bytes < 0
    assert (plan.pages, plan.seqs_that_fit) == (0, 0)
    assert plan.used_share > 5


def test_the_busiest_gpu_counts():
    asked = Deployment(config=GLM, seqs=33, prefill=1001)
    assert asked.seqs_per_gpu == 5
    assert asked.steps_of_rank() == {"decode": Cell(0, 5, 6), "mixed": Cell(126, 5, 6)}


def test_floors_are_those_of_the_table():
    floors = plan_of().floors
    assert floors["decode"].total == pytest.approx(28.512e-3, rel=1e-4)
    assert floors["mixed"].total == pytest.approx(101.215e-3, rel=1e-4)


def test_a_floor_is_between_its_greatest_limit_and_the_sum_of_all():
    for floor in plan_of().floors.values():
        alone = floor.memory, floor.compute, floor.link
        assert max(alone) < floor.total < sum(alone)


def test_one_gpu_exchanges_nothing():
    assert plan_of(gpus=1).floors["mixed"].link == 0


def test_there_are_no_floors_for_types_that_the_step_time_does_not_know():
    assert plan_of(weight_dtype="bfloat16").floors is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 7}, "does not divide the 256 routed experts"),
        ({"seqs": 0}, "seqs is 0; allowed: 1 or more"),
        ({"context": 2**21}, "positions end at 1048576"),
        ({"weight_dtype": "int4"}, "allowed: fp8, bfloat16, float32"),
        ({"config": GLM.replace(num_nextn_predict_layers=0)}, "no MTP layer to draft with"),
        (
            {"config": GLM.replace(moe_intermediate_size=96)},
            "moe_intermediate_size to be a multiple of 128",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Deployment(**{"config": GLM} | options)


def test_a_cache_type_that_the_model_does_not_fit_is_refused():
    narrow = Deployment(config=GLM.replace(kv_lora_rank=256))
    with pytest.raises(ValueError, match="a layout for kv_lora_rank 512"):
        make_plan(narrow, UNKNOWN)


def test_json_stands_alone(capsys):
    assert main(["plan", "--json", "--program-mib", "512"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["weights"]["elements"] == 753_329_940_480
    assert printed["cache"]["without_mtp"]["per_token"] == 53_940
    assert printed["program"]["steps"] == {"any step": 512 << 20}
    assert printed["memory"]["seqs_that_fit"] == 32
    assert set(printed["floors"]) == {"decode", "mixed"}


def test_a_plan_without_the_compiler_goes_on_and_says_so(capsys, monkeypatch):
    monkeypatch.setattr("glm_jax.deployment.command.importlib.util.find_spec", lambda name: None)
    assert main(["plan", "--preset", "glm-5.3", "--gpus", "8"]) == 0
    printed = capsys.readouterr().out
    assert "not compiled: needs jax-cuda13-plugin and jax-cuda13-pjrt" in printed
    for figure in ("106.0", "107.8", "53,940", "54,728", "28.3", "28.5", "101.2", "9,482"):
        assert figure in printed


def test_wrong_options_are_one_line(capsys):
    assert main(["plan", "--gpus", "7"]) == 2
    assert main(["plan", "--program-mib", "-1"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_the_compiled_slice_holds_every_kind_of_layer():
    assert program_peak.slice_layers(GLM) == 7
    assert program_peak.slice_layers(PRESETS["glm-5"]) == 4


def test_one_rank_has_its_share_of_experts_and_rows():
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    lowering = program_peak.rank_lowering(Deployment(config=GLM), 7, place)
    assert (lowering.model.num_hidden_layers, lowering.model.n_routed_experts) == (7, 32)
    assert lowering.engine.widest == Cell(1024, 4, 6)
    assert (lowering.engine.weight_dtype, lowering.engine.kv_cache_dtype) == ("fp8", "fp8_ds_mla")
    assert lowering.page_bytes == 64 * (8 * 656 + 5 * 132)


@pytest.fixture
def described_cpu(monkeypatch):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    monkeypatch.setattr(program_peak, "described_device", lambda: place)


def test_a_step_needs_scratch_memory_and_its_new_results(described_cpu, monkeypatch):
    def compile_program(_, cell):
        temporary = 100 * cell.rows
        return None, CompileReport(cell, "compiled", 1.0, 1.0, 7, 50, temporary, aliased_bytes=20)

    monkeypatch.setattr(program_peak, "compile_program", compile_program)
    program = program_peak.measure_programs(Deployment(config=GLM))
    assert program.temporaries == {"decode": 100 * 24 + 30, "mixed": 100 * (1024 + 24) + 30}
    assert program.peak == program.temporaries["mixed"]
    assert "first 7 of 78 layers" in program.source


def test_a_compiler_that_fails_leaves_the_reason(described_cpu, monkeypatch):
    def compile_program(*_):
        raise RuntimeError("no ptxas\nand more")

    monkeypatch.setattr(program_peak, "compile_program", compile_program)
    program = program_peak.measure_programs(Deployment(config=GLM))
    assert program == ProgramNeed({}, "not compiled: RuntimeError: no ptxas")
