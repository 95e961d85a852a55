"""Every file, command and anchor that the documents name exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from gateway.ops.cli import app

ROOT = Path(__file__).parent.parent
FOLDERS = ("coordinator", "deploy", "docs")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.md"))])
BEHAVIOUR = (ROOT / "docs" / "behaviour.md").read_text()
PROMISES = 200
"""behaviour.md makes more promises than this. If one of its tables is no longer read, there are far fewer."""


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives a document's headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_somewhere(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", document.read_text()):
        place = document.parent / target if target else document
        assert place.exists(), f"{document.name} links to {target}"
        assert not anchor or anchor in anchors(place), f"{document.name} links to {target}#{anchor}"


def promises() -> Iterator[tuple[str, str]]:
    """Each promise and its tests, from every table in behaviour.md that names tests."""
    has_tests = False
    for line in BEHAVIOUR.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            has_tests = False
        elif cells[-1] == "test":
            has_tests = True
        elif has_tests and set(cells[0]) != {"-"}:
            yield " ".join(cells[:-1]), cells[-1]


def test_every_promise_of_behaviour_names_a_test_that_exists() -> None:
    found = list(promises())
    assert len(found) > PROMISES
    for promise, tests in found:
        named = re.findall(r"`([\w/]+\.py)::(\w+)(…?)`", tests)
        assert named, f"no test is named for: {promise[:80]}"
        for file, function, cut in named:
            places = [each for each in (ROOT / "tests").rglob(Path(file).name) if each.match(file)]
            assert len(places) == 1, f"{file} is {[str(each.relative_to(ROOT)) for each in places] or 'not there'}"
            defined = re.findall(r"^(?:async )?def (\w+)\(", places[0].read_text(), flags=re.MULTILINE)
            meant = [name for name in defined if name == function or (cut and name.startswith(function))]
            assert len(meant) == 1, f"{file}::{function}{cut} means {meant or 'no test'}"


def test_every_file_that_a_document_names_exists() -> None:
    for document in DOCUMENTS:
        for name in re.findall(
            r"`((?:gateway|coordinator|tests|bench|deploy|configs|docs)/[\w./-]+)`", document.read_text()
        ):
            assert (ROOT / name).exists(), f"{document.name} names {name}"


def test_every_kvgate_command_of_a_document_exists_with_these_options() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for document in DOCUMENTS:
        text = document.read_text().replace("\\\n", " ")
        blocks = "\n".join(re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL))
        spans = re.findall(r"(?<!`)`([^`]+)`(?!`)", text.replace("\n", " "))
        for typed in [*blocks.splitlines(), *spans]:
            command = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?kvgate ([a-z][\w-]*)([^#|]*)", typed)
            if command is not None:
                assert command[1] in known, f"{document.name}: {typed}"
                options = {option for parameter in known[command[1]].params for option in parameter.opts} | {"--help"}
                assert set(re.findall(r"(?<!\S)--[a-z-]+", command[2])) <= options, f"{document.name}: {typed}"


def test_no_document_names_a_path_of_one_machine() -> None:
    for document in DOCUMENTS:
        assert not re.search(r"(?<![\w.])/(root|work|home)/", document.read_text()), document


def test_every_module_that_a_document_runs_exists_and_no_placeholder_is_left() -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        for module in re.findall(r"python -m ([\w.]+)", text):
            place = ROOT / module.replace(".", "/")
            runnable = (place.with_suffix(".py"), place / "__main__.py")
            assert any(file.exists() for file in runnable), f"{document.name} runs {module}"
        assert not re.search(r"^\s*[A-Z_]{6,}\s*$", text, flags=re.MULTILINE), document
