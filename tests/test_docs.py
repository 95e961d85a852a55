"""Every file, command and anchor that the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from gateway.ops.cli import app
from tests.promises import PAGE, functions, listed, page

ROOT = Path(__file__).parent.parent
FOLDERS = ("coordinator", "deploy", "docs")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.md"))])
PROMISES = 300
"""docs/behaviour/ makes more promises than this. If some of its tables are no longer read, there are fewer."""


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


def test_every_promise_names_tests_that_exist() -> None:
    text = PAGE.read_text()
    assert text == page(text), "python -m tests.promises"
    tests = listed(text)
    assert len(tests) > PROMISES
    for promise, named in tests.items():
        assert named, f"no test is named for {promise}"
        for file, function in (test.split("::") for test in named):
            assert function in functions(ROOT / "tests" / file), f"{promise}: {file} has no {function}"


def test_every_row_of_a_page_of_promises_has_a_number_of_its_own() -> None:
    for document in (ROOT / "docs" / "behaviour").glob("*.md"):
        rows = re.findall(r"^\| (.*?) \| .* \| .* \|$", document.read_text(), flags=re.MULTILINE)
        numbers = [number for number in rows if number != "no."]
        assert all(number.isdecimal() for number in numbers), document
        assert len(numbers) == len(set(numbers)), document


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
                found, words = known[command[1]], command[2].split()
                if hasattr(found, "commands") and words:
                    assert set(words[0].split("|")) <= found.commands.keys(), f"{document.name}: {typed}"
                    found = found.commands[words[0].split("|")[0]]
                options = {option for parameter in found.params for option in parameter.opts} | {"--help"}
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
