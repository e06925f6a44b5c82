"""Every finding code in the source is documented, and nothing else is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from nextn import inspect as package
from nextn.inspect.rules.engine import RAISED_WHERE_AN_ENGINE_FAILS

ROOT = Path(__file__).parents[2]


def emitted() -> dict[str, set[str]]:
    """Code -> severities, from every call of Finding in the rules."""
    found: dict[str, set[str]] = {}
    for path in (Path(package.__file__).parent / "rules").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                code, severity = node.args[0], node.args[1]
                assert isinstance(code, ast.Constant)
                words = {
                    n.value for n in ast.walk(severity) if isinstance(n, ast.Constant) and isinstance(n.value, str)
                }
                found.setdefault(code.value, set()).update(words & {"error", "warning", "info"})
    return found


def documented() -> dict[str, str]:
    rows = re.findall(r"^\| `([a-z-]+)` \| ([EWI/, ]+) \|", (ROOT / "docs" / "inspect.md").read_text(), re.M)
    assert len(rows) == len(dict(rows)), "a code is documented twice"
    return dict(rows)


def test_every_code_is_documented_and_every_documented_code_exists() -> None:
    assert set(documented()) == set(emitted())
    assert len(emitted()) > 30


def test_documented_severities_are_those_of_the_source() -> None:
    letters = {"error": "E", "warning": "W", "info": "I"}
    unpinned = {"shape-mismatch": {"warning"}, "tensors-unexpected": {"info"}}
    for code, severities in emitted().items():
        said = set(re.findall("[EWI]", documented()[code]))
        if code in RAISED_WHERE_AN_ENGINE_FAILS:
            assert documented()[code] == "W/E", code
            said.discard("E")
        assert said == {letters[s] for s in severities - unpinned.get(code, set())}, code
