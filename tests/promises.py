"""docs/behaviour/tests.md: which tests show each promise. `python -m tests.promises` completes and sorts it.

A promise is a row of a page in docs/behaviour/: `retries 3` is row 3 of retries.md. The command adds promises that are
new, and completes the beginning of a file's or a test's name that you wrote behind a promise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "behaviour"
PAGE = FOLDER / "tests.md"
_HEAD = """\
# The tests of each promise

`retries 3` is promise 3 of [retries.md](retries.md). `make test ARGS=tests/FILE` runs a file. A command keeps this page
complete: `python -m tests.promises`.

| promise | tests |
|---|---|
"""


def promises() -> Iterator[str]:
    """All promises, in the order of the pages' names and of the rows."""
    for page in sorted(FOLDER.glob("*.md")):
        yield from (f"{page.stem} {number}" for number in re.findall(r"^\| (\d+) \|", page.read_text(), re.MULTILINE))


def listed(text: str) -> dict[str, list[str]]:
    """Each promise of this page with its tests, as FILE::NAME."""
    rows = re.findall(r"^\| ([\w-]+ \d+) \| (.*)\|$", text, re.MULTILINE)
    return {promise: re.findall(r"[\w/]+\.py::\w+", tests) for promise, tests in rows}


def page(text: str) -> str:
    """The complete page, from what the page has now."""
    known = listed(text)
    rows = ((promise, [_completed(test) for test in known.get(promise, [])]) for promise in promises())
    return _HEAD + "".join(f"| {promise} | {'<br>'.join(f'`{test}`' for test in tests)} |\n" for promise, tests in rows)


def _completed(test: str) -> str:
    """The test with its folder below tests/ and its whole name, if there is only one such test."""
    file, name = test.split("::")
    places = [each for each in _files() if each.match(file)]
    if len(places) != 1:
        return test
    found = [each for each in functions(places[0]) if each.startswith(name)]
    whole = found[0] if len(found) == 1 and name not in found else name
    return f"{places[0].relative_to(ROOT / 'tests')}::{whole}"


@cache
def functions(file: Path) -> list[str]:
    """The names of all functions of a file."""
    return re.findall(r"^(?:async )?def (\w+)\(", file.read_text(), flags=re.MULTILINE)


@cache
def _files() -> list[Path]:
    return list((ROOT / "tests").rglob("test_*.py"))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
