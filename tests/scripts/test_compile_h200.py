"""What the H200 gate reads in the dumps of XLA and in what ptxas says."""

import subprocess

import pytest

from scripts.facts import facts_of
from scripts.h200.assembler import Assembler, KernelCode, read_log
from scripts.h200.compilation import Compiled
from scripts.h200.gate import kernel_problems, program_problems
from scripts.h200.hlo import parse_module
from scripts.h200.kernel_cases import kernel_cases
from scripts.h200.programs import model_of
from scripts.h200.temporaries import Temporary, largest_values
from scripts.h200.thunks import Thunks, count_thunks, read_thunks
from scripts.h200.weight_copies import WeightCopy, reads_weights, weight_copies

BUFFERED = """\
000: kCommandBuffer [source | sink]
    001: kCustomKernel [source       | next=003 (1)] loop_fusion grid: [1, 1, 1] threads: [32, 1, 1]
    003: kConditional  [prev=001 (1) | next=004 (1)]
      false_branch:
        002: kCustomKernel [source | sink] sort_1 grid: [8, 1, 1] threads: [128, 1, 1]
      true_branch:
        005: kCopy [source | sink] kCopy
    004: kCustomCall [prev=003 (1) | sink] kCustomCall
"""
LOOPED = """\
000: kCommandBuffer [source       | next=047 (1)]
    001: kCustomKernel [source | sink] first grid: [1, 1, 1] threads: [32, 1, 1]
047: kWhile         [prev=000 (1) | next=052 (1)]
condition:
    048: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        049: kCustomKernel [source | sink] gather grid: [4, 1, 1] threads: [128, 1, 1]
052: kCopy          [prev=047 (1) | sink        ] kCopy
"""
LOG = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the wgmma pipeline in function 'attend'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attend' for 'sm_90a'
ptxas info    : Function properties for attend
    8 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 2 barriers, 1024 bytes smem
ptxas info    : Compiling entry function 'sort_1' for 'sm_90a'
ptxas info    : Function properties for sort_1
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers
"""

HLO = """\
%cut (param_0.1: bf16[2,1024,1024]) -> bf16[1,1024,1024] {
  %param_0.1 = bf16[2,1024,1024]{2,1,0} parameter(0)
  ROOT %slice.1 = bf16[1,1024,1024]{2,1,0} slice(%param_0.1), slice={[0:1], [0:1024], [0:1024]}
}

%widen (param_0.2: f8e4m3fn[1024,1024]) -> f32[1024,1024] {
  %param_0.2 = f8e4m3fn[1024,1024]{1,0} parameter(0)
  ROOT %convert.1 = f32[1024,1024]{1,0} convert(%param_0.2)
}

%times (param_0.3: bf16[2,1024,1024], param_1.3: f32[8,1024]) -> (f32[8,1024], f32[1024,1024]) {
  %param_1.3 = f32[8,1024]{1,0} parameter(1)
  %param_0.3 = bf16[2,1024,1024]{2,1,0} parameter(0)
  ROOT %dot.1 = f32[8,1024]{1,0} dot(%param_1.3, %param_0.3), lhs_contracting_dims={1}
}

ENTRY %main.9 (params_0_.1: bf16[2,1024,1024], x.1: f32[8,1024]) -> f32[8,1024] {
  %params_0_.1 = bf16[2,1024,1024]{2,1,0} parameter(0), metadata={op_name="params[0]"}
  %params_1_.1 = f8e4m3fn[1,1024,1024]{2,1,0} parameter(1)
  %params_2_.1 = bf16[1024]{0} parameter(2)
  %x.1 = f32[8,1024]{1,0} parameter(3)
  %sliced = bf16[1,1024,1024]{2,1,0} fusion(%params_0_.1), kind=kLoop, calls=%cut, metadata={}
  %seen = f8e4m3fn[1024,1024]{1,0} bitcast(%params_1_.1)
  %widened = f32[1024,1024]{1,0} fusion(%seen), kind=kLoop, calls=%widen
  %small = f32[1024]{0} convert(%params_2_.1)
  %moved = f32[1024,1024]{0,1} copy(%x.1)
  %joined = (u8[2], u8[2], u8[2], u8[2], u8[2], /*index=5*/bf16[1048576]) copy(%params_0_.1)
  ROOT %product = (f32[8,1024]{1,0}, f32[1024,1024]) fusion(%sliced, %x.1), calls=%times
}
"""
BRANCHES = """\
%cut (param_0.1: bf16[2,1024,1024]) -> bf16[1,1024,1024] {
  %param_0.1 = bf16[2,1024,1024]{2,1,0} parameter(0)
  ROOT %slice.1 = bf16[1,1024,1024]{2,1,0} slice(%param_0.1), slice={[0:1], [0:1024], [0:1024]}
}

%run (tuple.1: (f32[8,1024], bf16[2,1024,1024])) -> f32[1024,1024] {
  %tuple.1 = (f32[8,1024]{1,0}, bf16[2,1024,1024]{2,1,0}) parameter(0)
  %rows = f32[8,1024]{1,0} get-tuple-element(%tuple.1), index=0
  %stack = bf16[2,1024,1024]{2,1,0} get-tuple-element(%tuple.1), index=1
  %sliced = bf16[1,1024,1024]{2,1,0} fusion(%stack), kind=kLoop, calls=%cut
  %moved = f32[1024,8]{1,0} copy(%rows)
  ROOT %product = f32[8,1024]{1,0} dot(%rows, %sliced), lhs_contracting_dims={1}
}

%skip (weights: f8e4m3fn[1024,1024]) -> f32[1024,1024] {
  %weights = f8e4m3fn[1024,1024]{1,0} parameter(0)
  %widened = f32[1024,1024]{1,0} convert(%weights)
  ROOT %zeros = f32[8,1024]{1,0} constant({...})
}

ENTRY %main.9 (params_0_.1: bf16[2,1024,1024], x.1: f32[8,1024]) -> f32[8,1024] {
  %params_0_.1 = bf16[2,1024,1024]{2,1,0} parameter(0), metadata={op_name="params[0]"}
  %params_1_.1 = f8e4m3fn[1024,1024]{1,0} parameter(1)
  %x.1 = f32[8,1024]{1,0} parameter(2)
  %run.1 = pred[] parameter(3)
  %both = (f32[8,1024]{1,0}, bf16[2,1024,1024]{2,1,0}) tuple(%x.1, %params_0_.1)
  ROOT %cond.1 = f32[8,1024]{1,0} conditional(%run.1, %both, %params_1_.1), CALLED
}
"""
BUFFERS = """\
allocation 0: size 64, parameter 0, shape |f32[16]| at ShapeIndex {}:
 value: <1 params_0_.1 @0> (size=64,offset=0): f32[16]{0}
allocation 1: size 96, preallocated-temp:
 value: <2 first @0> (size=32,offset=0): f32[8]{0}
 value: <3 pair{0} @0> (size=48,offset=32): f32[12]{0}
 value: <4 later @0> (size=32,offset=0): f32[8]{0}
"""

PTXAS = f"""\
#!/bin/sh
[ $1 != --version ] || {{ echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0; }}
cat >&2 <<'END'
{LOG}
END
echo "$@" >&2
exit 3
"""


def test_a_step_in_one_command_buffer_is_recognised():
    thunks = count_thunks(BUFFERED)
    assert thunks.one_buffer
    # Both branches count, the copy does not.
    assert (thunks.command_buffers, thunks.kernels, thunks.outside) == (1, 3, 0)
    assert (thunks.host_loops, thunks.host_branches, thunks.culprits) == (0, 0, ())


def test_what_stands_outside_command_buffers_is_counted_and_named():
    thunks = count_thunks(LOOPED)
    assert not thunks.one_buffer
    assert (thunks.command_buffers, thunks.kernels, thunks.outside) == (2, 3, 1)
    assert (thunks.host_loops, thunks.culprits) == (1, ("While", "wrapped_compare", "Copy"))


def test_thunks_are_read_after_xlas_passes(tmp_path):
    (tmp_path / "module_1.jit_step.thunk_sequence.txt").write_text(LOOPED)
    assert not read_thunks(tmp_path).one_buffer
    (tmp_path / "module_1.jit_step.thunk_sequence_after_thunk_passes.txt").write_text(BUFFERED)
    assert read_thunks(tmp_path).one_buffer


def test_copies_of_weights_are_found_whether_cut_or_widened():
    found = weight_copies(parse_module(HLO))
    assert [(copy.name, copy.size, copy.weights) for copy in found] == [
        ("sliced", 2 << 20, ("params_0_.1",)),
        ("widened", 4 << 20, ("params_1_.1",)),
        ("joined", (2 << 20) + 10, ("params_0_.1",)),
    ]


@pytest.mark.parametrize(
    "called",
    ["true_computation=%run, false_computation=%skip", "branch_computations={%run, %skip}"],
)
def test_copies_of_weights_are_found_in_the_branches_of_a_conditional(called):
    found = weight_copies(parse_module(BRANCHES.replace("CALLED", called)))
    assert [(copy.name, copy.weights, copy.in_branch) for copy in found] == [
        ("sliced", ("params_0_.1",), True),
        ("widened", ("params_1_.1",), True),
    ]


def test_a_conditional_without_branches_is_an_error():
    with pytest.raises(ValueError, match="without branches"):
        parse_module(BRANCHES)


def test_a_line_of_an_unknown_form_is_an_error():
    with pytest.raises(ValueError, match="no instruction of the known form"):
        parse_module(HLO.replace("copy(%x.1)", "copy of x"))


def compiled(**differences) -> Compiled:
    """A step with which nothing is wrong, but for the differences."""
    thunks = Thunks(1, True, 3, 0, 0, 0, ())
    right = Compiled(1, 1, 10, 8, 6, 4, 0, (), (), {}, thunks, (), True, ())
    return right._replace(**differences)


def test_a_sound_step_passes_the_gate():
    assert program_problems(compiled(), cache_arrays=(4, 2)) == ()


@pytest.mark.parametrize(
    ("differences", "message"),
    [
        ({"thunks": Thunks(1, False, 3, 1, 0, 0, ("sort_1",))}, "outside: sort_1"),
        ({"aliased_bytes": 5}, "not all of it is written in place"),
        ({"temporaries": (Temporary("copy.1", "u16[1,1]", 2),)}, "copy.1 u16[1,1] is as large"),
        ({"weight_copies": (WeightCopy("cut", 3 << 20, ("params_0_.1",)),)}, "cut copies 3 MiB"),
        ({"reads_weights": False}, "copies of them cannot be found"),
    ],
)
def test_the_gate_names_what_is_wrong_with_a_step(differences, message):
    (problem,) = program_problems(compiled(**differences), cache_arrays=(4, 2))
    assert message in problem


def test_copies_of_weights_in_branches_are_counted_but_pass_the_gate():
    copies = (WeightCopy("cut", 3 << 20, ("params_0_.1",), in_branch=True),)
    assert program_problems(compiled(weight_copies=copies), cache_arrays=(4, 2)) == ()
    assert compiled(weight_copies=copies).copied_bytes == 3 << 20


def test_the_gate_names_what_is_wrong_with_a_kernel():
    kernels = KernelCode("attend", 255, 32, 0, True), KernelCode("sound", 168, 0, 0, False)
    found = kernel_problems(compiled(own_kernels=kernels, launch_shared={"attend": 1, "lost": 1}))
    assert found == (
        "lost did not go through ptxas",
        "attend spills 32 bytes",
        "attend: tensor-core instructions are serialised",
    )


def test_weights_are_known_by_their_arguments_name():
    assert reads_weights(parse_module(HLO))
    assert not reads_weights(parse_module(HLO.replace("params_", "weights_")))


def test_facts_need_no_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert facts_of("cpu")["commit"] is None


def test_a_dump_without_an_entry_is_an_error():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse_module("HloModule jit_step")


def test_the_largest_temporaries_are_named_once_per_shape():
    assert [value.name for value in largest_values(BUFFERS, 5)] == ["pair{0}", "first"]


def test_a_dump_without_thunks_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no \*\.thunk_sequence"):
        read_thunks(tmp_path)


def test_registers_spills_and_serialised_instructions_are_read():
    assert read_log(LOG) == [
        KernelCode("attend", registers=255, spilled=32, static_shared=1024, serialized=True),
        KernelCode("sort_1", registers=48, spilled=0, static_shared=0, serialized=False),
    ]


def test_the_assembler_keeps_what_ptxas_says_and_passes_it_on(tmp_path, monkeypatch):
    real, ours = tmp_path / "real", tmp_path / "ours"
    real.mkdir()
    ours.mkdir()
    script = real / "ptxas"
    script.write_text(PTXAS)
    script.chmod(0o755)
    monkeypatch.setattr("scripts.h200.assembler._find_ptxas", lambda: str(script))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assembler = Assembler(ours)
    run = subprocess.run(["ptxas", "in.ptx"], capture_output=True, text=True, check=False)
    assert assembler.version == "13.0.88"
    assert run.returncode == 3
    assert run.stderr.endswith("in.ptx -v\n")
    assert [kernel.name for kernel in assembler.take()] == ["attend", "sort_1"]
    assert assembler.take() == []
    assert list(assembler.known) == ["attend", "sort_1"]


def test_a_slice_of_a_preset_has_layers_of_every_kind():
    model = model_of("glm-5.3:6")
    assert model.num_hidden_layers == 6
    assert set(model.indexer_types) == {"full", "shared"}
    assert set(model.mlp_layer_types) == {"dense", "sparse"}


@pytest.mark.parametrize("name", ["glm-4", "glm-5.3:0", "glm-5.3:79", "glm-5.3:x"])
def test_unknown_models_are_refused(name):
    with pytest.raises(ValueError, match=r"is called|cannot be taken"):
        model_of(name)


def test_kernel_cases_have_names_of_their_own():
    names = [(case.operator, case.name) for case in kernel_cases()]
    assert len(names) == len(set(names))
