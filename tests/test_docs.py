"""The documents keep their word: what they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("coordinator", "deploy", "docs")
DOCUMENTS = sorted([ROOT / "README.md", *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.md"))])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_statement_of_behaviour_names_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "behaviour.md").read_text()
    statements = re.split(r"^- \*\*", text, flags=re.MULTILINE)[1:]
    assert len(statements) > 20
    for statement in statements:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", statement)
        assert named, f"no test is named for: {statement[:80]}"
        for file, function in named:
            source = (ROOT / file).read_text()
            assert re.search(rf"^(async )?def {function}\(", source, flags=re.MULTILINE), f"{file}::{function}"


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
