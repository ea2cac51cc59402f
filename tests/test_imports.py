"""What an import costs: host-only modules load no JAX, the package's front door loads nothing."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import glm_jax

ROOT = Path(__file__).resolve().parents[1]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]


def host_only_modules() -> list[str]:
    """The modules that import-linter's host-only contract names, wildcards expanded."""
    (contract,) = (c for c in CONTRACTS if c["name"].startswith("host-only"))
    excepted = {line.split(" -> ")[0] for line in contract["ignore_imports"]}
    modules = []
    for name in contract["source_modules"]:
        if name.endswith(".*"):
            folder = ROOT / name.removesuffix(".*").replace(".", "/")
            modules += [f"{name[:-2]}.{path.stem}" for path in sorted(folder.glob("[!_]*.py"))]
        else:
            modules.append(name)
    return [name for name in modules if name not in excepted]


def test_host_only_modules_leave_jax_unloaded():
    modules = host_only_modules()
    assert len(modules) > 10
    program = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
    loaded = sorted({{"jax", "jaxlib", "flax"}} & set(sys.modules))
    assert not loaded, f"{{name}} loads {{loaded}}"
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("name", glm_jax.__all__)
def test_public_names_resolve(name):
    assert getattr(glm_jax, name).__name__ == name
    assert name in dir(glm_jax)


def test_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Llm'; it has"):
        _ = glm_jax.Llm


def test_lazy_table_and_type_checkers_agree():
    source = ast.parse((ROOT / "glm_jax" / "__init__.py").read_text())
    typed = {
        alias.name: node.module
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("glm_jax")
        for alias in node.names
    }
    assert typed == glm_jax._HOMES
    assert sorted(glm_jax._HOMES) == sorted(glm_jax.__all__)
