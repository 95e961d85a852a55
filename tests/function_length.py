"""Checks that no function is too long to read at once: `python tests/function_length.py`, part of `make check`.

A function's docstring and decorators do not count. The functions inside it do.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 50
_FOLDERS = ("gateway", "coordinator", "bench", "deploy", "tests")


def main(root: Path) -> int:
    files = [path for folder in _FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    lengths = {
        f"{path.relative_to(root)}:{name}": lines
        for path in files
        for name, lines in functions(ast.parse(path.read_text("utf-8")))
    }
    too_long = {name: lines for name, lines in lengths.items() if lines > MAX_LINES}
    for name, lines in too_long.items():
        print(f"{name} has {lines} lines, the limit is {MAX_LINES}")
    if not too_long:
        print(f"none of {len(lengths)} functions has more than {MAX_LINES} lines")
    return 1 if too_long else 0


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Each function's dotted name, and its lines without docstring and decorators."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, _lines(node)
            yield from functions(node, f"{name}.")
        else:
            yield from functions(node, prefix)


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    docstring_lines = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring_lines


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
