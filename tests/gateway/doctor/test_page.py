"""docs/doctor.md matches the code."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.doctor.examine import kinds
from gateway.doctor.page import page

YOURS = {"FILE", "PORT"}
ROOT = Path(__file__).resolve().parents[3]


def test_the_page_lists_every_finding_as_the_code_has_it() -> None:
    assert (ROOT / "docs" / "doctor.md").read_text() == page(), "python -m gateway.doctor.page > docs/doctor.md"


def test_what_is_in_capitals_is_filled_in_unless_the_page_says_that_it_is_the_readers() -> None:
    filled_in = {name.upper() for kind in kinds() for name in re.findall(r"\{(\w+)\}", kind.fix)}
    asked_for = {
        word for kind in kinds() for word in re.findall(r"(?:--[a-z-]+ |:/*|kvgate [a-z-]+ )([A-Z]{3,})\b", kind.fix)
    }
    head = page().partition("|")[0]
    assert asked_for == YOURS
    assert set(re.findall(r"\b[A-Z]{3,}\b", head)) == filled_in | YOURS
