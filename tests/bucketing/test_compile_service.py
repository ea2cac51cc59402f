"""The compile service: hot programs now, the rest from children that may die at any time."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from bucketing_toys import CELL, FINGERPRINT, OTHER, compiled, lower, run

from bucketing.cell import Cell
from bucketing.compile_child import CompileChild, CompileError
from bucketing.compile_service import CompileService
from bucketing.program_key import encode_key
from bucketing.program_store import ProgramStore, ProgramStoreWarning
from bucketing.programs import ProgramTable

WORKER = Path(__file__).with_name("fake_compile_worker.py")
COMMAND = (sys.executable, str(WORKER))
NEVER = "the parent compiled in the background"


@pytest.fixture
def prepared(tmp_path):
    """The folder of programs that the fake worker can "compile"."""
    store = ProgramStore(tmp_path / "prepared", FINGERPRINT)
    for key in (CELL, OTHER):
        store.save(key, *compiled(key))
    return store.folder


@pytest.fixture
def make_service(tmp_path, prepared):
    services = []

    def make(store=None, **arguments):
        job = {"prepared": str(prepared), **arguments.pop("job", {})}
        store = store or ProgramStore(tmp_path / "programs", FINGERPRINT)
        arguments = {"lower": refuse, "command": COMMAND, **arguments}
        service = CompileService(ProgramTable(), store=store, job=job, **arguments)
        services.append(service)
        return service

    yield make
    for service in services:
        service.close()


def refuse(key):
    raise AssertionError(f"{NEVER}: {key}")


def asked(prepared, name="Cell-4-0-1"):
    """The processes that were asked for a program."""
    file = prepared / f"{name}.asked"
    return file.read_text().split() if file.exists() else []


def test_warm_compiles_and_stores_what_the_next_start_loads(make_service, compile_counter):
    reports = []
    key = Cell(2, 0, 1)
    first = make_service(lower=lower, on_done=reports.append)
    before = compile_counter.compiled
    first.warm([key, key])
    first.warm([key])
    assert compile_counter.compiled == before + 1
    second = make_service(lower=refuse, on_done=reports.append)
    second.warm([key])
    assert [(r.key, r.source, r.problem) for r in reports] == [
        (key, "compiled", ""),
        (key, "loaded", ""),
    ]
    assert reports[0].stored_bytes == reports[1].stored_bytes > 0
    assert run(second.table[key], rows=2) == run(first.table[key], rows=2)


def test_warm_goes_on_when_a_program_cannot_be_stored(make_service, monkeypatch):
    service = make_service(lower=lower)
    monkeypatch.setattr(
        service.store, "save", lambda key, program, report: report._replace(problem="full")
    )
    key = Cell(2, 0, 1)
    service.warm([key])
    assert service.table.reports[key].problem == "full"


def test_background_programs_come_from_a_child_and_are_promoted(make_service, prepared):
    done = threading.Event()
    service = make_service(on_done=lambda report: done.set())
    service.start([CELL])
    assert service.wait(60)
    assert done.is_set()
    assert service.pending == ()
    assert service.failed == {}
    assert run(service.table[CELL]) == run(compiled()[0])
    report = service.table.reports[CELL]
    assert (report.source, report.seconds) == ("compiled", compiled()[1].compile_seconds)
    assert asked(prepared) not in ([], [str(os.getpid())])


def test_background_loads_what_is_stored_without_a_child(make_service, prepared):
    first = make_service()
    first.start([CELL, OTHER])
    assert first.wait(60)
    second = make_service(command=["/no/such/program"])
    second.start([CELL, OTHER])
    assert second.wait(60)
    assert {report.source for report in second.table.reports.values()} == {"loaded"}
    assert second.failed == {}


def test_one_child_compiles_several_programs_and_two_share_them(make_service, prepared):
    service = make_service()
    service.start([CELL, OTHER])
    assert service.wait(60)
    assert asked(prepared) == asked(prepared, "Cell-3-0-1")
    both = make_service(ProgramStore.temporary(FINGERPRINT), children=2)
    both.start([CELL, OTHER])
    assert both.wait(60)
    assert set(both.table) == {CELL, OTHER}


@pytest.mark.parametrize("misdeed", ["die", "fail", "die while writing"])
def test_a_failure_is_tried_once_more_in_a_fresh_child(make_service, prepared, misdeed):
    service = make_service(job={"misdeeds": {"Cell-4-0-1": [misdeed]}})
    service.start([CELL, OTHER])
    assert service.wait(60)
    assert service.failed == {}
    assert set(service.table) == {CELL, OTHER}
    first, second = asked(prepared)
    assert first != second
    assert run(service.table[CELL]) == run(compiled()[0])


@pytest.mark.parametrize(
    ("misdeed", "reason"),
    [("die", "code -9: out of memory"), ("fail", "ValueError: the compiler says no")],
)
def test_a_program_that_fails_twice_is_listed_and_the_rest_goes_on(
    make_service, prepared, misdeed, reason
):
    told = []
    service = make_service(
        job={"misdeeds": {"Cell-4-0-1": [misdeed] * 5}},
        on_failed=lambda key, why: told.append((key, why)),
    )
    service.start([CELL, OTHER])
    assert service.wait(60)
    assert len(asked(prepared)) == 2
    assert list(service.table) == [OTHER]
    assert list(service.failed) == [CELL]
    assert reason in service.failed[CELL]
    assert told == list(service.failed.items())
    assert service.pending == ()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"job": {"cannot_start": True}}, "code 7: no such accelerator"),
        ({"command": ["/no/such/program"]}, "FileNotFoundError"),
        ({"command": ()}, "no command"),
    ],
)
def test_children_that_cannot_start_fail_their_programs_with_the_reason(
    make_service, arguments, reason
):
    service = make_service(**arguments)
    others = [Cell(rows, 0, 1) for rows in range(10, 40)]
    service.start([CELL, *others])
    assert service.wait(60)
    # Two starts are enough to know; the others are not tried one by one.
    assert set(service.failed) == {CELL, *others}
    assert len(service.failed) == 31
    assert all(reason in text for text in service.failed.values())


def test_a_tampered_program_of_a_child_is_refused_and_retried(make_service, prepared, tmp_path):
    warnings = []
    store = ProgramStore(tmp_path / "own", FINGERPRINT, warn=warnings.append)
    for binary in prepared.glob("*.bin"):
        binary.write_bytes(binary.read_bytes()[:-1] + b"x")
    service = make_service(store)
    service.start([CELL])
    assert service.wait(60)
    assert len(warnings) == 2
    assert "could not be loaded" in service.failed[CELL]
    assert len(service.table) == 0


def test_a_foreign_entry_is_replaced_in_warm(make_service):
    service = make_service(lower=lower)
    key = Cell(2, 0, 1)
    service.warm([key])
    (entry,) = service.store.folder.glob("Cell-2-0-1.json")
    entry.write_text(entry.read_text().replace(FINGERPRINT, "cd" * 32))
    again = make_service(lower=lambda _: lower(key))
    with pytest.warns(ProgramStoreWarning, match="another program, model, version or machine"):
        again.warm([key])
    assert again.table.reports[key].source == "compiled"


def test_what_a_child_prints_is_not_taken_for_an_answer(make_service):
    service = make_service(job={"misdeeds": {"Cell-4-0-1": ["babble"]}})
    service.start([CELL])
    assert service.wait(60)
    assert service.failed == {}


def test_close_ends_a_working_child_at_once(make_service, prepared):
    service = make_service(job={"misdeeds": {"Cell-4-0-1": ["hang"]}})
    service.start([CELL, OTHER])
    pid = wait_until_asked(prepared)
    service.close()
    service.close()
    assert not is_running(pid)
    assert service.pending == ()
    assert service.wait(0)
    assert (len(service.table), service.failed) == (0, {})
    with pytest.raises(RuntimeError, match="closed"):
        service.start([CELL])


def test_a_childs_child_ends_with_its_killed_parent(prepared, tmp_path):
    """The parent is a process of its own, killed while its child works."""
    script = tmp_path / "parent.py"
    job = {
        "prepared": str(prepared),
        "root": str(tmp_path),
        "fingerprint": FINGERPRINT,
        "misdeeds": {"Cell-4-0-1": ["hang"]},
    }
    script.write_text(
        "import sys\n"
        "sys.path.insert(0, '.')\n"
        "from bucketing.cell import Cell\n"
        "from bucketing.compile_child import CompileChild\n"
        f"CompileChild({COMMAND!r}, {job!r}).compile(Cell(4, 0, 1))\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)])
    try:
        pid = wait_until_asked(prepared)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    for _ in range(6000):
        if not is_running(pid):
            break
        threading.Event().wait(0.01)
    assert not is_running(pid)


def test_child_that_answers_for_another_program_is_not_believed(tmp_path):
    script = tmp_path / "liar.py"
    answer = {"key": encode_key(OTHER), "error": ""}
    script.write_text(
        f"import json; input(); print('ready', flush=True); input(); print(json.dumps({answer!r}))"
    )
    child = CompileChild([sys.executable, str(script)], {})
    with pytest.raises(CompileError, match="answered for"):
        child.compile(CELL)
    child.close()


def test_service_refuses_no_children(make_service):
    with pytest.raises(ValueError, match="children is 0"):
        make_service(children=0)


def wait_until_asked(prepared):
    """The process id of the child, once it works on the program."""
    for _ in range(6000):
        if asked(prepared):
            return int(asked(prepared)[0])
        threading.Event().wait(0.01)
    raise AssertionError("no child was asked within a minute")


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # An orphan that has ended may be a zombie until init reaps it.
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] != "Z"
