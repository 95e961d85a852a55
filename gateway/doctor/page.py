"""docs/doctor.md, made from the kinds of findings: `python -m gateway.doctor.page > docs/doctor.md`."""

from __future__ import annotations

import re
import sys

from gateway.doctor.examine import kinds

_HEAD = """\
# What `kvgate doctor` finds

`kvgate doctor` looks at a running cluster: its Redis, every gateway, every replica and its agent. It changes nothing,
and exits with 0 if nothing is wrong, with 1 if it found something, and with 2 if there was nothing to look at: a wrong
option or file, or no cluster. An error is unsafe, or keeps something from working. A warning costs speed, memory or
certainty. In a fix, the doctor fills in REPLICA, URL, MASTER, NAME and BYTES; you fill in FILE and PORT.
This page is made from the code: `python -m gateway.doctor.page > docs/doctor.md`.

| finding | | why it matters | fix |
|---|---|---|---|
"""


def page() -> str:
    """The whole document."""
    return _HEAD + "".join(
        f"| `{kind.code}` | {kind.severity} | {_cell(kind.why)} | {_cell(kind.fix)} |\n" for kind in kinds()
    )


def _cell(text: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda name: name[1].upper(), text).replace("|", r"\|").replace("*", r"\*")


if __name__ == "__main__":
    sys.stdout.write(page())
