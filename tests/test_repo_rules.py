"""The taste meter: rules of the house that no linter knows."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("glm_jax", "bucketing", "pallas_kernels")
CODE = sorted(
    path for folder in (*PACKAGES, "scripts", "tests") for path in (ROOT / folder).rglob("*.py")
)
PRODUCT = [path for path in CODE if path.relative_to(ROOT).parts[0] in PACKAGES]

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150

# Optional dependencies, imported where they are needed.
LATE_IMPORTS = {
    "fastapi",
    "huggingface_hub",
    "llguidance",
    "matplotlib",
    "optax",
    "prometheus_client",
    "torch",
    "transformers",
    "uvicorn",
}
BANNED_STEMS = {"util", "utils", "helper", "helpers", "common", "misc", "mixin", "mixins"}
BANNED_CLASS = re.compile(r"(Manager|Mixin|Helper|Utils?)$")

# In pieces, so that this file does not match itself.
MACHINE_PATH = re.compile(
    r"(?:^|[^a-zA-Z0-9_.])/(?:" + "|".join(["work", "farm", "root", "tmp", "home"]) + r")/[a-zA-Z]"
)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def repository_files() -> list[Path]:
    """Tracked and new files; all files where there is no git (a source archive)."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    else:
        paths = [
            path
            for path in ROOT.rglob("*")
            if not any(part.startswith(".venv") or part == "__pycache__" for part in path.parts)
        ]
    return [path for path in paths if path.is_file()]


def test_files_are_short():
    lengths = {relative(path): len(path.read_text().splitlines()) for path in CODE}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_are_short():
    too_long = {}
    for path in CODE:
        limit = MAX_KERNEL_LINES if path.name == "mosaic_gpu.py" else MAX_FUNCTION_LINES
        for function in functions(path):
            lines = function.end_lineno - function.lineno + 1
            if lines > limit:
                too_long[f"{relative(path)}:{function.lineno} {function.name}"] = lines
    assert too_long == {}


def test_functions_do_not_import():
    hidden = []
    for path in CODE:
        for function in functions(path):
            for node in ast.walk(function):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module]
                else:
                    continue
                hidden += [
                    f"{relative(path)}:{node.lineno} imports {name}"
                    for name in names
                    if name.split(".")[0] not in LATE_IMPORTS
                ]
    assert hidden == []


def test_names_say_what_a_thing_is():
    bad = [relative(path) for path in CODE if path.stem in BANNED_STEMS]
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and BANNED_CLASS.search(node.name):
                bad.append(f"{relative(path)}:{node.lineno} class {node.name}")
    assert bad == []


def test_no_machine_paths():
    named = []
    for path in repository_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if MACHINE_PATH.search(line) and not line.startswith("#!"):
                named.append(f"{relative(path)}:{number}")
    assert named == []


def test_library_reads_no_environment():
    reads = [
        f"{relative(path)}:{node.lineno}"
        for path in PRODUCT
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    ]
    assert reads == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_code_is_a_package(package):
    folders = {path.parent for path in (ROOT / package).rglob("*.py")}
    assert [relative(path) for path in folders if not (path / "__init__.py").exists()] == []
