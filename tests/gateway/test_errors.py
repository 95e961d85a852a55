"""docs/errors.md lists the errors that the code raises."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {"not_found", "method_not_allowed"}
"""Codes that a table in gateway/control/routes.py finds by their status."""


def raised() -> Iterator[tuple[str, str]]:
    """The code and the status of each error, as far as they are written where it is made."""
    files = [file for file in (ROOT / "gateway").rglob("*.py") if "simulator" not in file.parts]
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if called == "bad_field":
            yield (text_of(node.args[2]) if len(node.args) > 2 else "invalid_value"), "400"
        elif called == "ApiError" and len(node.args) > 1:
            status, code = node.args[:2]
            yield text_of(code), str(status.value) if isinstance(status, ast.Constant) else ""


def text_of(node: ast.expr) -> str:
    """A string; what stands in braces is OBJECT. Empty: neither."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "OBJECT" for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else ""


def test_the_page_lists_the_errors_that_the_code_raises_and_no_others() -> None:
    rows = re.findall(r"^\| (`.*?) \| (\d+) \|", (ROOT / "docs" / "errors.md").read_text(), flags=re.MULTILINE)
    listed = {(code, status) for codes, status in rows for code in re.findall(r"`(\w+)`", codes)}
    found = {(code, status) for code, status in raised() if code and status}
    any_status = {code for code, status in raised() if code and not status} | ELSEWHERE
    assert found - listed == set()
    assert {code for code, _ in listed - found} - any_status == set()
    assert any_status <= {code for code, _ in listed}
