"""The catalogue's table is whole: every entry is in it, and every test that it names exists."""

import ast
import functools
import re
from pathlib import Path

from scripts.mutations import MUTATIONS

TESTS = Path(__file__).resolve().parents[1]
ROW = re.compile(r"\| (\d+) \| ([^|]+) \| ([^|]+) \|$")
# Several ranks, and grammars.
WITHOUT_A_TEST = {12, 30, 36, 58, 59, 60, 61}
MUTATED = {*range(1, 32), *range(51, 65)} - WITHOUT_A_TEST


def rows() -> dict[int, tuple[str, list[str]]]:
    """Symptom and test ids of each entry."""
    found = {}
    for line in (TESTS / "catalogue" / "README.md").read_text().splitlines():
        if match := ROW.match(line):
            number, symptom, tests = match.groups()
            assert int(number) not in found, f"entry {number} is there twice"
            found[int(number)] = symptom, re.findall(r"`([^`]+)`", tests)
    return found


@functools.cache
def docstrings_of(path: str) -> dict[str, str]:
    """Docstrings of the tests of a file by name."""
    tree = ast.parse((TESTS / path).read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {node.name: ast.get_docstring(node) or "" for node in functions}


def test_every_entry_is_in_the_table_once():
    assert list(rows()) == [*range(1, 65)]
    assert {number for number, (_, tests) in rows().items() if not tests} == WITHOUT_A_TEST


def test_every_test_of_the_table_exists():
    named = [test.partition("::") for _, tests in rows().values() for test in tests]
    assert [(path, name) for path, _, name in named if name not in docstrings_of(path)] == []


def test_every_test_of_the_catalogue_is_in_the_table_under_its_number():
    listed = rows()
    for path in sorted((TESTS / "catalogue").glob("test_d*.py")):
        for name, docstring in docstrings_of(path.relative_to(TESTS).as_posix()).items():
            if not name.startswith("test_"):
                continue
            number = int(docstring.split(":")[0])
            assert f"catalogue/{path.name}::{name}" in listed[number][1]


def test_every_mutation_is_of_a_test_in_the_table():
    listed = rows()
    assert {one.entry for one in MUTATIONS} == MUTATED
    for one in MUTATIONS:
        test = one.test.removeprefix("tests/").partition("[")[0]
        assert test in listed[one.entry][1], one.entry
