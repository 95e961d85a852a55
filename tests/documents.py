"""The commands of documents, typed as they stand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.polling import wait_until

ROOT = Path(__file__).parent.parent
_ALL_RAN = "(all commands have run)"
_ENDS_WITHIN_S = 30
_FORKED_KVGATE = Path(__file__).with_name("forked_kvgate.py")


def section(document: str, heading: str) -> str:
    """The part of docs/`document` below this heading."""
    text = (ROOT / "docs" / document).read_text()
    (found,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    return str(found)


def blocks(text: str, language: str) -> list[str]:
    """The contents of all blocks in this language."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text, flags=re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in found]


def commands(block: str) -> Iterator[str]:
    """The commands of a block: the text after each `$ `, with continued lines and here-documents, without output."""
    lines = iter(block.splitlines())
    for line in lines:
        if not line.startswith("$ "):
            continue
        typed = [line.removeprefix("$ ")]
        while typed[-1].endswith("\\") or ("<<END" in typed[0] and typed[-1] != "END"):
            typed.append(next(lines))
        yield "\n".join(typed)


def example(document: str, heading: str, instead: Mapping[str, str]) -> list[str]:
    """The commands of a section, with what the test has instead of a port or a path of the document."""
    found = [command for block in blocks(section(document, heading), "console") for command in commands(block)]
    for old, new in instead.items():
        assert any(old in command for command in found), f"{document} has no {old}"
        found = [command.replace(old, new) for command in found]
    return found


@contextmanager
def typing(folder: Path, typed: Sequence[str], at_end: Sequence[str] = (), within_s: float = 60) -> Iterator[str]:
    """Types commands in a shell in this folder, with kvgate on the PATH. Yields what they have printed, once all have
    run. What runs in the background is stopped at the end."""
    end = ["end() {", "  set +e", *at_end, "  kill $(jobs -p) 2>/dev/null", "  wait", "}", "trap end EXIT"]
    script = "\n".join(["set -e", *end, *typed, f"echo '{_ALL_RAN}'", "read -r", ""])
    printed = folder / "printed.txt"
    with tempfile.TemporaryDirectory(prefix="kvgate-bin-") as programs, printed.open("wb") as output:
        kvgate = Path(programs, "kvgate")
        kvgate.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {_FORKED_KVGATE} "$@"\n')
        kvgate.chmod(0o700)
        shell = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env=os.environ | {"PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_until(lambda: _ALL_RAN in printed.read_text() or shell.poll() is not None, within_s=within_s)
            assert _ALL_RAN in printed.read_text(), printed.read_text()
            yield printed.read_text()
        finally:
            try:
                shell.communicate(timeout=_ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                os.killpg(shell.pid, signal.SIGKILL)
                shell.communicate()
