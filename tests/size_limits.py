"""Checks the length of files and functions: `python tests/size_limits.py`, part of `make check`.

The limits, and every exception with a ceiling of its own, stand in pyproject.toml under [tool.kvgate.size]. Raising
one is a reviewed line; one that is no longer needed is a mistake too, so that the list only names what is long.
A function's docstring and decorators do not count; functions inside it do.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

_FOLDERS = ("gateway", "coordinator", "bench", "deploy", "tests")
_SUFFIXES = (".py", ".lua")


def main(root: Path) -> int:
    limits = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["kvgate"]["size"]
    paths = sorted(path for folder in _FOLDERS for path in (root / folder).rglob("*") if path.suffix in _SUFFIXES)
    files = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}
    file_lines = {name: len(text.splitlines()) for name, text in files.items()}
    function_lines = {
        f"{name}:{function}": lines
        for name, text in files.items()
        if name.endswith(".py")
        for function, lines in functions(ast.parse(text))
    }
    problems = [
        *violations(file_lines, limits["file_lines"], limits.get("files", {})),
        *violations(function_lines, limits["function_lines"], limits.get("functions", {})),
    ]
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{len(file_lines)} files and {len(function_lines)} functions are within their limits")
    return 1 if problems else 0


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Each function's dotted name and its lines without docstring and decorators."""
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
    is_docstring = ast.get_docstring(function, clean=False) is not None
    docstring_lines = (first.end_lineno or 0) - first.lineno + 1 if is_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring_lines


def violations(measured: dict[str, int], limit: int, ceilings: dict[str, int]) -> Iterator[str]:
    """What is over its ceiling, and ceilings that nothing needs."""
    for name, lines in measured.items():
        ceiling = ceilings.get(name, limit)
        if lines > ceiling:
            yield f"{name} has {lines} lines, its limit is {ceiling}"
    for name in ceilings:
        if measured.get(name, 0) <= limit:
            yield f"{name} needs no exception (pyproject.toml, tool.kvgate.size): remove it"


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
