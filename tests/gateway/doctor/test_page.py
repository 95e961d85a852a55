"""docs/doctor.md is what the code says."""

from __future__ import annotations

from pathlib import Path

from gateway.doctor.page import page

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_lists_every_finding_as_the_code_has_it() -> None:
    assert (ROOT / "docs" / "doctor.md").read_text() == page(), "python -m gateway.doctor.page > docs/doctor.md"
