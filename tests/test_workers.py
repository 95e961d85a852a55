"""Tests that run in forked processes: none is lost with its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DYING = """
import os

def test_passes(): pass
def test_dies(): os._exit(0)
def test_after_it(): print("said"); assert not "right"
"""
OTHER = """
def test_elsewhere(): pass
"""


def test_a_process_that_dies_fails_its_test_and_the_tests_after_it_run(tmp_path: Path) -> None:
    files = [tmp_path / "test_dying.py", tmp_path / "test_other.py"]
    for file, text in zip(files, (DYING, OTHER), strict=True):
        file.write_text(text)
    options = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml", "-n", "2")
    run = subprocess.run(
        (sys.executable, "-m", "pytest", *options, *files), capture_output=True, text=True, check=False
    )
    assert "2 failed, 2 passed" in run.stdout
    assert "the process that ran" in run.stdout
    assert "said" in run.stdout
    assert run.returncode == 1
