"""The store of compiled programs: what it gives back, what it refuses, what a kill leaves."""

import json
import os
import stat

import jax
import pytest
from bucketing_toys import CELL, FINGERPRINT, OTHER, compiled, forget, run

from bucketing import program_store
from bucketing.cell import Cell
from bucketing.fingerprint import cpu_facts, fingerprint, platform_facts, sources_hash
from bucketing.piecewise import Piece
from bucketing.program_key import decode_key, encode_key, key_name
from bucketing.program_store import ProgramStore, ProgramStoreWarning, UnsafeFolderError
from bucketing.programs import NoProgramError, ProgramTable

LOADED_ELSEWHERE = """
import sys
sys.path.insert(0, "tests")
from pathlib import Path
from bucketing.program_store import ProgramStore
from bucketing_toys import CELL, FINGERPRINT, run
program, report = ProgramStore(Path({root!r}), FINGERPRINT).load(CELL)
content, in_place = run(program)
print(content.hex(), in_place, report.source)
"""


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours handles it."""


@pytest.fixture
def root(tmp_path):
    return tmp_path / "programs"


@pytest.fixture
def store(root):
    store = ProgramStore(root, FINGERPRINT)
    store.save(CELL, *compiled())
    return store


def entry_of(store):
    return json.loads((store.folder / "Cell-4-0-1.json").read_text())


def binary_of(store):
    return store.folder / f"{entry_of(store)['sha256']}.bin"


def test_store_gives_a_program_back_with_its_report(store):
    report = compiled()[1]
    program, loaded = store.load(CELL)
    assert run(program) == run(compiled()[0])
    assert (loaded.key, loaded.source) == (CELL, "loaded")
    told = {"source": "loaded", "seconds": loaded.seconds, "stored_bytes": loaded.stored_bytes}
    assert loaded == report._replace(**told)
    assert loaded.aliased_bytes == 60
    assert loaded.stored_bytes == binary_of(store).stat().st_size > 0


def test_a_loaded_program_keeps_donation_and_bits_in_another_process(store, run_python, tmp_path):
    script = tmp_path / "load.py"
    script.write_text(LOADED_ELSEWHERE.format(root=str(store.folder.parent)))
    finished = run_python(str(script))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == [run(compiled()[0])[0].hex(), "True", "loaded"]


def test_store_has_nothing_for_other_keys_or_fingerprints(store, root):
    assert CELL in store
    assert Cell(8, 0, 1) not in store
    assert store.load(Cell(8, 0, 1)) is None
    assert ProgramStore(root, "cd" * 32).load(CELL) is None


def test_folders_and_files_are_closed_to_others(store, root):
    for path in (root, store.folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in store.folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def change_a_byte(store):
    content = bytearray(binary_of(store).read_bytes())
    content[len(content) // 2] ^= 1
    binary_of(store).write_bytes(content)


def truncate(store):
    os.truncate(binary_of(store), 100)


def remove_the_binary(store):
    binary_of(store).unlink()


def truncate_the_entry(store):
    os.truncate(store.folder / "Cell-4-0-1.json", 40)


def point_at_another_file(store):
    """A file with a matching hash, but outside: only names that are hashes are followed."""
    entry = entry_of(store) | {"sha256": "../" + "a" * 61}
    (store.folder / "Cell-4-0-1.json").write_text(json.dumps(entry))


def copy_from_another_machine(store):
    entry = entry_of(store) | {"fingerprint": "cd" * 32}
    (store.folder / "Cell-4-0-1.json").write_text(json.dumps(entry))


def rename_from_another_cell(store):
    entry = entry_of(store) | {"key": ["Cell", 8, 0, 1]}
    (store.folder / "Cell-4-0-1.json").write_text(json.dumps(entry))


def open_the_binary_to_others(store):
    binary_of(store).chmod(0o666)


def replace_the_binary_by_a_link(store):
    target = store.folder / "elsewhere"
    binary_of(store).rename(target)
    binary_of(store).symlink_to(target)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (change_a_byte, "not what was written"),
        (truncate, "100 bytes"),
        (remove_the_binary, "FileNotFoundError"),
        (truncate_the_entry, "Unterminated|Expecting|delimiter"),
        (point_at_another_file, "incomplete"),
        (copy_from_another_machine, "another program, model, version or machine"),
        (rename_from_another_cell, "another program"),
        (open_the_binary_to_others, "mode 666"),
        (replace_the_binary_by_a_link, "OSError"),
    ],
)
def test_store_refuses_and_removes_a_damaged_program(store, damage, reason):
    damage(store)
    with pytest.warns(ProgramStoreWarning, match=f"refused and removed .*({reason})"):
        assert store.load(CELL) is None
    assert CELL not in store
    # Recompiled, it is as good as new.
    store.save(CELL, *compiled())
    assert run(store.load(CELL)[0]) == run(compiled()[0])


def test_store_never_unpickles_what_it_refuses(store, monkeypatch):
    change_a_byte(store)
    monkeypatch.setattr(program_store.pickle, "loads", lambda _: pytest.fail("unpickled"))
    with pytest.warns(ProgramStoreWarning):
        store.load(CELL)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_store_refuses_a_folder_open_to_others(store, root, mode):
    root.chmod(mode)
    with pytest.raises(UnsafeFolderError, match=f"mode {mode:o}.*mode 700"):
        ProgramStore(root, FINGERPRINT)


def test_store_refuses_a_folder_of_another_user(store, root, monkeypatch):
    monkeypatch.setattr(program_store.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(UnsafeFolderError, match="owner"):
        ProgramStore(root, FINGERPRINT)


def test_store_refuses_a_folder_that_is_a_link(store, root, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(root)
    with pytest.raises(UnsafeFolderError):
        ProgramStore(link, FINGERPRINT)


@pytest.mark.parametrize("call", range(6))
@pytest.mark.parametrize("known", [False, True], ids=["new", "replacing"])
def test_a_kill_while_writing_leaves_the_old_program_or_none(root, monkeypatch, call, known):
    store = ProgramStore(root, FINGERPRINT)
    if known:
        store.save(CELL, *compiled())
    calls = iter(range(100))

    def kill_at(real):
        def killing(*arguments):
            if next(calls) == call:
                raise Killed
            return real(*arguments)

        return killing

    # Binary: fsync 0, rename 1, folder 2. Entry: fsync 3, rename 4, folder 5.
    with monkeypatch.context() as patch:
        patch.setattr(program_store.os, "fsync", kill_at(os.fsync))
        patch.setattr(program_store.os, "replace", kill_at(os.replace))
        with pytest.raises(Killed):
            store.save(CELL, *compiled())
    after = ProgramStore(root, FINGERPRINT)
    assert (CELL in after) == (known or call == 5)
    if CELL in after:
        assert run(after.load(CELL)[0]) == run(compiled()[0])
    after.save(CELL, *compiled())
    assert run(after.load(CELL)[0]) == run(compiled()[0])


def test_leftovers_of_killed_writers_are_swept_when_old(store, root):
    old, young = store.folder / "x.bin.tmp", store.folder / ("e" * 64 + ".bin")
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    os.utime(binary_of(store), (0, 0))
    again = ProgramStore(root, FINGERPRINT)
    assert not old.exists()
    assert young.exists()
    assert again.load(CELL) is not None
    os.utime(young, (0, 0))
    ProgramStore(root, FINGERPRINT)
    assert not young.exists()


def test_save_reports_a_full_disk_and_leaves_nothing(root, monkeypatch):
    store = ProgramStore(root, FINGERPRINT)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(program_store.os, "fsync", full)
        report = store.save(CELL, *compiled())
    assert report.problem == "cannot be written: [Errno 28] No space left on device"
    assert list(store.folder.iterdir()) == []


def test_save_reports_a_program_that_cannot_be_serialised(root, monkeypatch):
    store = ProgramStore(root, FINGERPRINT)

    def refuse(_):
        raise ValueError("Compilation does not support serialization")

    monkeypatch.setattr(program_store.serialize_executable, "serialize", refuse)
    report = store.save(CELL, *compiled())
    assert report.problem == (
        "cannot be serialised: ValueError: Compilation does not support serialization"
    )
    assert CELL not in store


def test_report_is_read_without_loading(store, monkeypatch):
    monkeypatch.setattr(program_store.pickle, "loads", lambda _: pytest.fail("unpickled"))
    assert store.report(CELL).temporary_bytes == compiled()[1].temporary_bytes
    assert store.report(Cell(8, 0, 1)) is None


def test_small_values_are_kept_beside_the_programs(store, root):
    assert store.load_json("step_times") is None
    store.save_json("step_times", {"a": [1, 2.5]})
    assert ProgramStore(root, FINGERPRINT).load_json("step_times") == {"a": [1, 2.5]}
    (store.folder / "step_times.kept").write_text("{")
    with pytest.warns(ProgramStoreWarning, match="step_times"):
        assert store.load_json("step_times") is None


def test_temporary_store_goes_away_with_its_last_reference():
    store = ProgramStore.temporary(FINGERPRINT)
    folder = store.folder
    store.save(CELL, *compiled())
    assert store.load(CELL) is not None
    del store
    assert not folder.parent.exists()


def test_programs_compiled_for_the_store_do_not_come_from_jaxs_cache(tmp_path):
    # JAX hands such an executable out; its serialised copy loads, and fails when called.
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path / "jax"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    forget(OTHER)
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        program, report = compiled(OTHER)
        assert jax.config.values["jax_enable_compilation_cache"]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert list((tmp_path / "jax").glob("*")) == []
    store = ProgramStore(tmp_path / "programs", FINGERPRINT)
    store.save(OTHER, program, report)
    assert run(store.load(OTHER)[0], rows=3) == run(program, rows=3)


def test_table_keeps_the_first_program_of_a_key():
    table = ProgramTable()
    program, report = compiled()
    assert table.get(CELL) is None
    assert table.add(CELL, program, report)
    assert not table.add(CELL, compiled(OTHER)[0], report)
    assert table[CELL] is table.get(CELL) is program
    assert CELL in table
    assert (len(table), list(table)) == (1, [CELL])
    with pytest.raises(NoProgramError, match="no program for embed of 8 rows; compiled: Cell"):
        table[Piece("embed", 8)]


@pytest.mark.parametrize("key", [Cell(64, 8, 1), Piece("embed", 8)])
def test_keys_survive_json(key):
    assert decode_key(json.loads(json.dumps(encode_key(key)))) == key
    assert type(decode_key(encode_key(key))) is type(key)


def test_keys_have_readable_names_and_others_are_refused():
    assert key_name(Piece("attend_full", 8)) == "Piece-attend_full-8"
    for content in ([], ["Cell", 1], ["Folder", 1, 2, 3]):
        with pytest.raises(ValueError, match="is no program key"):
            decode_key(content)


def test_fingerprint_changes_with_every_fact(tmp_path):
    facts = platform_facts(jax.devices()[0]) | {"program": {"pages": 3}}
    assert fingerprint(facts) == fingerprint(dict(reversed(facts.items())))
    for name in facts:
        assert fingerprint(facts | {name: "other"}) != fingerprint(facts)


def test_cpu_facts_ignore_cores_and_order_but_not_flags(tmp_path):
    info = tmp_path / "cpuinfo"

    def facts(*flags):
        info.write_text("".join(f"model name\t: X 1\nflags\t\t: {f}\n" for f in flags))
        return cpu_facts(info)

    assert facts("a avx") == facts("avx a", "a avx")
    assert facts("a avx") != facts("a avx avx2")
    assert "processor" in cpu_facts(tmp_path / "absent")


def test_sources_hash_sees_content_names_and_places(tmp_path):
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    file = package / "inner" / "a.py"
    file.write_text("x = 1")
    hashes = {sources_hash([package])}
    file.write_text("x = 2")
    hashes.add(sources_hash([package]))
    file.rename(package / "a.py")
    hashes.add(sources_hash([package]))
    (package / "notes.txt").write_text("not a source")
    assert len(hashes) == 3
    assert sources_hash([package]) in hashes
