"""Compiled programs on disk, so that a later start, or another process, need not compile them.

Executables are pickles: whoever can write one here runs code in every process that loads it. So
the folder must belong to this user and be closed to all others, and a file is loaded only if its
SHA-256 stands in an entry that this store wrote.

    ROOT/<fingerprint>/<key>.json     the entry: hash, size, fingerprint and the compiler's report
    ROOT/<fingerprint>/<hash>.bin     the executable, named by its content

The entry is written last and every write is temporary file, fsync, rename: a process killed at any
moment leaves either the whole program or none.
"""

import hashlib
import json
import os
import pickle
import stat
import tempfile
import time
import warnings
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import jax
from jax.experimental import serialize_executable

from bucketing.program_key import ProgramKey, encode_key, key_name
from bucketing.programs import CompileReport

# What a killed writer may leave; older than this, no living writer will come back to it.
_ABANDONED_SECONDS = 3600.0
_FORMAT = 1
_MEASURES = (
    "compile_seconds",
    "argument_bytes",
    "output_bytes",
    "temporary_bytes",
    "aliased_bytes",
    "code_bytes",
)


class UnsafeFolderError(PermissionError):
    """A folder that others can write to, or that belongs to somebody else."""


class ProgramStoreWarning(UserWarning):
    """A stored program was refused and removed; it will be compiled again."""


class ProgramStore:
    """The stored programs of one fingerprint.

    Attributes:
        folder: where they are.
        fingerprint: what they were compiled for.
        lasting: whether a later start will find them.
    """

    def __init__(
        self,
        root: Path,
        fingerprint: str,
        *,
        devices: list[jax.Device] | None = None,
        warn: Callable[[str], Any] | None = None,
    ) -> None:
        """Make or check the folders.

        Args:
            root: the folder of all fingerprints; made if absent.
            fingerprint: see ``bucketing.fingerprint``.
            devices: the devices that programs run on; by default the first one.
            warn: told of every refused entry; by default a ``ProgramStoreWarning`` is issued.

        Raises:
            UnsafeFolderError: a folder is not ours alone.
            OSError: it cannot be made.
        """
        self.fingerprint = fingerprint
        self.lasting = True
        self.folder = root / fingerprint[:32]
        self._devices = devices if devices is not None else jax.devices()[:1]
        self._warn = warn if warn is not None else _warn
        for folder in (root, self.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_folder(folder)
        self._sweep()

    @classmethod
    def temporary(
        cls, fingerprint: str, *, devices: list[jax.Device] | None = None
    ) -> "ProgramStore":
        """A store of this process alone, removed with it: how children hand programs over."""
        root = Path(tempfile.mkdtemp(prefix="programs-"))
        store = cls(root, fingerprint, devices=devices)
        store.lasting = False
        weakref.finalize(store, rmtree, root, ignore_errors=True)
        return store

    def __contains__(self, key: ProgramKey) -> bool:
        """Whether there is an entry; ``load`` may still refuse it."""
        return self._entry_file(key).exists()

    def report(self, key: ProgramKey) -> CompileReport | None:
        """What is known of a stored program, without loading it; None if there is none."""
        started = time.perf_counter()
        entry = self._entry(key)
        return None if entry is None else _report_of(key, entry, started)

    def load(self, key: ProgramKey) -> tuple[jax.stages.Compiled, CompileReport] | None:
        """Load a program.

        Returns:
            The program and its report, or None where there is none, or none to be trusted: such
            an entry is removed with a warning.
        """
        started = time.perf_counter()
        entry = self._entry(key)
        if entry is None:
            return None
        try:
            content = self._trusted(entry)
            parts = pickle.loads(zlib.decompress(content))
            program = serialize_executable.deserialize_and_load(
                *parts, backend=self._devices[0].client, execution_devices=self._devices
            )
        except Exception as error:  # damaged content can fail in any way
            self._refuse(key, f"{type(error).__name__}: {error}")
            return None
        return program, _report_of(key, entry, started)

    def save(
        self, key: ProgramKey, program: jax.stages.Compiled, report: CompileReport
    ) -> CompileReport:
        """Store a program that was just compiled.

        One that has run already may not be serialisable: XLA's sort on CPU binds its comparison at
        the first run ("LessThan is not serializable", jax 0.10.2). One that was loaded must not be
        stored again: its serialised copy has lost code.

        Returns:
            The report with its size on disk, or with the reason why it could not be stored.
        """
        try:
            content = _serialized(program)
        except Exception as error:  # each backend has its own ways to say that it cannot
            reason = f"cannot be serialised: {type(error).__name__}: {error}"
            return report._replace(problem=reason)
        digest = hashlib.sha256(content).hexdigest()
        entry = {
            "format": _FORMAT,
            "key": encode_key(key),
            "fingerprint": self.fingerprint,
            "sha256": digest,
            "bytes": len(content),
            "report": {name: getattr(report, name) for name in _MEASURES},
        }
        try:
            self._write(f"{digest}.bin", content)
            self._write(self._entry_file(key).name, json.dumps(entry, indent=1).encode())
        except OSError as error:
            return report._replace(problem=f"cannot be written: {error}")
        return report._replace(stored_bytes=len(content))

    def remove(self, key: ProgramKey) -> None:
        """Forget a program: the entry first, so that no reader finds it half gone."""
        try:
            digest = str(json.loads(self._entry_file(key).read_bytes())["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            digest = ""
        self._entry_file(key).unlink(missing_ok=True)
        if len(digest) == 64 and digest.isalnum():
            (self.folder / f"{digest}.bin").unlink(missing_ok=True)

    def save_json(self, name: str, content: Any) -> None:
        """Keep something small beside the programs, for example fitted step times."""
        self._write(f"{name}.kept", json.dumps(content).encode())

    def load_json(self, name: str) -> Any:
        """What ``save_json`` kept, or None."""
        try:
            return json.loads(_read_own(self.folder / f"{name}.kept"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._warn(f"{name} in {self.folder} is unreadable and ignored: {error}")
            return None

    def _entry_file(self, key: ProgramKey) -> Path:
        return self.folder / f"{key_name(key)}.json"

    def _entry(self, key: ProgramKey) -> dict[str, Any] | None:
        """The checked entry of a key."""
        try:
            entry = json.loads(_read_own(self._entry_file(key)))
            _check_entry(entry, key, self.fingerprint)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._refuse(key, str(error))
            return None
        return entry

    def _trusted(self, entry: dict[str, Any]) -> bytes:
        """The very bytes whose hash the entry holds."""
        content = _read_own(self.folder / f"{entry['sha256']}.bin")
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise ValueError(f"the content ({len(content)} bytes) is not what was written")
        return content

    def _refuse(self, key: ProgramKey, reason: str) -> None:
        self.remove(key)  # first: a warning may be turned into an exception
        self._warn(
            f"the stored program of {key} in {self.folder} is refused and removed ({reason}). "
            "It will be compiled again."
        )

    def _write(self, name: str, content: bytes) -> None:
        """Write a file whole or not at all, even if the machine stops."""
        number, temporary = tempfile.mkstemp(prefix=f"{name}.", suffix=".tmp", dir=self.folder)
        try:
            with open(number, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.folder / name)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _sweep(self) -> None:
        """Remove what killed writers left: temporary files, and executables without an entry."""
        now = time.time()
        named = set()
        for file in self.folder.glob("*.json"):
            try:
                named.add(f"{json.loads(file.read_bytes())['sha256']}.bin")
            except (OSError, ValueError, KeyError, TypeError):
                continue  # refused when it is asked for
        for file in (*self.folder.glob("*.tmp"), *self.folder.glob("*.bin")):
            try:
                if file.name not in named and now - file.stat().st_mtime > _ABANDONED_SECONDS:
                    file.unlink()
            except FileNotFoundError:
                continue  # another process swept it


def check_folder(folder: Path) -> None:
    """Refuse a folder that anybody else could write to.

    Raises:
        UnsafeFolderError: it is a link, of another owner, or open to group or others.
    """
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or mode & 0o077:
        raise UnsafeFolderError(
            f"{folder} (owner {found.st_uid}, mode {mode:o}) cannot hold executables: it must be a "
            f"folder of user {os.getuid()} with mode 700. Change its owner and mode, or use "
            "another folder."
        )


def _read_own(file: Path) -> bytes:
    """Read a file that is ours and that nobody else may write; checked on the open file."""
    number = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    with open(number, "rb") as opened:
        found = os.fstat(number)
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or mode & 0o022:
            raise UnsafeFolderError(f"{file.name} has owner {found.st_uid} and mode {mode:o}")
        return opened.read()


def _check_entry(entry: Any, key: ProgramKey, fingerprint: str) -> None:
    """Raise ValueError unless the entry was written by this store for this key."""
    if not isinstance(entry, dict) or entry.get("format") != _FORMAT:
        raise ValueError("its entry has another format")
    if entry.get("fingerprint") != fingerprint or entry.get("key") != encode_key(key):
        raise ValueError("its entry is of another program, model, version or machine")
    digest, measures = entry.get("sha256"), entry.get("report")
    named = isinstance(digest, str) and len(digest) == 64 and digest.isalnum()
    if not named or not isinstance(measures, dict) or set(measures) != set(_MEASURES):
        raise ValueError("its entry is incomplete")


def _report_of(key: ProgramKey, entry: dict[str, Any], started: float) -> CompileReport:
    return CompileReport(
        key=key,
        source="loaded",
        seconds=time.perf_counter() - started,
        stored_bytes=entry["bytes"],
        **entry["report"],
    )


def _serialized(program: jax.stages.Compiled) -> bytes:
    """An executable as bytes; level 1 makes it four times smaller in hundredths of a second."""
    return zlib.compress(pickle.dumps(serialize_executable.serialize(program)), level=1)


def _warn(message: str) -> None:
    warnings.warn(message, ProgramStoreWarning, stacklevel=2)
