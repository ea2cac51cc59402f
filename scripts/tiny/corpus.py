"""The text: the running interpreter's standard library, split by file."""

import hashlib
import platform
import random
import sysconfig
from pathlib import Path
from typing import NamedTuple

TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
SKIPPED_FOLDERS = frozenset({"site-packages", "__pycache__", "pydoc_data", "lib-dynload"})
# Tables, not code: they would teach the model lists of code points.
TABLES = frozenset({"entities.py", "schema.py", "sequence.py"})
_ENCODINGS = "__init__ aliases idna punycode utf_8 utf_8_sig utf_16 uu_codec zlib_codec"
CODE_OF_ENCODINGS = frozenset(_ENCODINGS.split())
SMALLEST_FILE = 200
DEV_FILES = 14
TEST_FILES = 60


class Corpus(NamedTuple):
    """Texts of the three splits, and what identifies them.

    `dev` are library files that are not trained on; `test` are the library's own unit tests, a
    different kind of text of which training sees none.
    """

    train: tuple[str, ...]
    dev: tuple[str, ...]
    test: tuple[str, ...]
    python_version: str
    files_hash: str


def read_corpus(root: Path | None = None) -> Corpus:
    """Read the standard library below `root` (default: that of this interpreter)."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    library, tests = list_files(root)
    if len(library) <= DEV_FILES:
        raise ValueError(
            f"{root} holds {len(library)} library files, which is too few to train on "
            f"(more than {DEV_FILES} are needed). Name the folder of a full standard library."
        )
    random.Random(0).shuffle(library)
    random.Random(1).shuffle(tests)
    return Corpus(
        train=tuple(_read(path) for path in library[DEV_FILES:]),
        dev=tuple(_read(path) for path in library[:DEV_FILES]),
        test=tuple(_read(path) for path in tests[:TEST_FILES]),
        python_version=platform.python_version(),
        files_hash=hash_files(root, library + tests),
    )


def list_files(root: Path) -> tuple[list[Path], list[Path]]:
    """Return the library's source files and its unit test files, each sorted by path."""
    library, tests = [], []
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if SKIPPED_FOLDERS.intersection(folders):
            continue
        if TEST_FOLDERS.intersection(folders):
            if folders == ("test",) and path.name.startswith("test_"):
                tests.append(path)
        elif _is_code(path, folders) and path.stat().st_size > SMALLEST_FILE:
            library.append(path)
    return library, tests


def _is_code(path: Path, folders: tuple[str, ...]) -> bool:
    if folders[:1] == ("encodings",) and path.stem not in CODE_OF_ENCODINGS:
        return False
    return path.name not in TABLES and not path.name.startswith("_sysconfigdata")


def hash_files(root: Path, paths: list[Path]) -> str:
    """Return the SHA-256 of the sorted list of relative paths and sizes."""
    lines = sorted(f"{path.relative_to(root).as_posix()} {path.stat().st_size}" for path in paths)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
