"""What CI and the image install is pinned with hashes, and is what pyproject.toml allows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_IMAGE, OF_CI = ROOT / "deploy" / "docker" / "requirements.txt", ROOT / ".ci" / "requirements.txt"
DEV = PROJECT["optional-dependencies"]["dev"] + PROJECT["optional-dependencies"]["local"]
PICKER = PROJECT["optional-dependencies"]["picker"]
OURS = "kvgate"


def pinned(file: Path) -> list[Requirement]:
    """Each line's requirement. Fails on a line without a hash."""
    lines = file.read_text().splitlines()
    assert [line for line in lines if not re.search(r" --hash=sha256:[0-9a-f]{64}( |$)", line)] == []
    return [Requirement(line.partition(" --hash=")[0]) for line in lines]


@pytest.mark.parametrize(
    ("file", "wanted"),
    [(OF_IMAGE, [*PROJECT["dependencies"], *PICKER]), (OF_CI, [*PROJECT["dependencies"], *DEV, *PICKER])],
)
def test_each_dependency_is_pinned_to_a_version_that_is_allowed(file: Path, wanted: list[str]) -> None:
    found: dict[str, list[str]] = {}
    for one in pinned(file):
        found.setdefault(canonicalize_name(one.name), []).append(next(iter(one.specifier)).version)
    for text in wanted:
        asked = Requirement(text)
        versions = found.get(canonicalize_name(asked.name), [])
        assert asked.name == OURS or versions, f"{text} is not in {file.name}: run make lock"
        assert all(asked.specifier.contains(version) for version in versions), f"{text}: run make lock"
