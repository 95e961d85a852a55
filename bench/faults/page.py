"""docs/faults.md, all of it, from the rows that were measured.

    python -m bench.faults.page

writes it anew without measuring anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import orjson

from bench.faults import results
from bench.faults.fault import LATE_AFTER_S
from bench.faults.load import ANSWER_TOKENS, CONTEXTS, DECODE_S, RATE_PER_S
from bench.faults.processes import HANG_LATE_AFTER_S
from bench.faults.row import Row
from bench.faults.table import FAULTS
from bench.faults.verdicts import PREFILL_S
from bench.faults.watch import STEADY_S

_HEAD = f"""# Faults

What clients see when something dies, hangs or lies, and how long it takes until all is right again. This page is
written by `.venv/bin/python -m bench.faults`; what KVGate promises is in [behaviour.md](behaviour.md).

Each fault strikes a cluster of its own, of real processes on one machine: Redis, three simulated replicas with an agent
each, and gateways with their default settings, on which a load balancer spreads {RATE_PER_S:g} requests a second. Half
of them are streams. Their prompts share {CONTEXTS} beginnings of 1 300 tokens, and answers take
{ANSWER_TOKENS[0] * DECODE_S:.1f} to {ANSWER_TOKENS[1] * DECODE_S:.1f} s. The balancer asks each gateway's /ready once a
second, and tries the next gateway where a connection is refused. What it has sent it never sends again.

## What is counted

- **failed**: requests that got no whole answer: another status than 200, a stream with an error event, a connection
  that broke. **Could have been saved** are all of these but streams that had begun, on a replica or gateway that the
  fault struck, and requests whose connection broke because their gateway, or the link to it, was struck. A process that
  is told to stop may finish what it has: nothing is lost with it. Every fault leaves a gateway and two replicas
  unharmed.
- **late**: streams of which a token came more than {LATE_AFTER_S:g} s after the one before it, or the first one after
  the request was sent; and other answers that took {LATE_AFTER_S:g} s more than their tokens take. In brackets, and no
  goal, are those that could not be sooner: their gateway, or the link to it, was struck while they were there, or their
  replica when it was answering them: the client had a byte, or the replica had had them for {PREFILL_S:g} s.
  A replica that hangs looks like one that computes a long prompt, for 10 s: there, late is what comes more than
  {HANG_LATE_AFTER_S:g} s late.
- **exact again**: seconds until something was wrong for the last time, before all was right for {STEADY_S:g} s. Wrong
  are a gateway that does not answer, or is not exact on a replica; a second in which more than one request in ten was
  placed without the map; a load in Redis that is not the sum of its reservations, or not what clients have under way
  (give or take a quarter); a lease or an open breaker that ends later than any can. Of a gateway, agent or coordinator
  that is killed, it is counted from the fault. Of all else it is counted from the fault's end: when what was held goes
  on, or when Redis or the replica answers again.
- **load**: whether any load is left in Redis once all requests have ended.
- **predictions**: then each beginning is asked for once more. Right are those that are decided `exact`ly, and for which
  the engine's `cached_tokens` lie between what the map foretold and the prompt's next boundary, give or take a block.

Goals: none that could have been saved, none late, exact again within 5 s (gateways, agents, coordinators, links) or 2 s
(Redis, the link to it), no load left, all predictions right. A replica has no such time: its engine has to start.

Links lead through a proxy while they are struck. Where bytes go one way only, TCP's own probes find the proxy alive:
connections stay open and silent. Redis' clock is stepped for KVGate's scripts alone, which is where it is read.
"""
PAGE = Path("docs/faults.md")
_COLUMNS = "| name | fault | requests | failed | could have been saved | late | exact again | load | predictions | |"
_LINE = "|---|---|---|---|---|---|---|---|---|---|"


def page(rows: Sequence[Row], machine: Mapping[str, str]) -> str:
    """In Markdown."""
    parts = [_HEAD]
    for gateways, some in groupby(rows, key=lambda row: row.gateways):
        parts.append(_section(gateways, list(some)))
    parts.append(_machine(rows, machine))
    return "\n".join(parts)


def write(file: Path, to: Path) -> None:
    """The page of the results in a file. Raises OSError, and ValueError for what is none."""
    to.write_text(page(results.read(file), orjson.loads(file.read_bytes())["machine"]))


def _section(gateways: int, rows: Sequence[Row]) -> str:
    lines = [f"## {gateways} gateways", "", _COLUMNS, _LINE, *map(line, rows), ""]
    missed = [row for row in rows if row.missed]
    measured = [row for row in rows if not row.skipped]
    lines += [f"{len(measured) - len(missed)} of {len(measured)} faults met all goals.", ""]
    if missed:
        lines += ["Missed:", ""]
        lines += [f"- {row.fault}: {_cell('; '.join(row.missed))}" for row in missed]
        lines.append("")
    return "\n".join(lines)


def line(row: Row) -> str:
    """A fault's row of the table."""
    names = f"| {row.fault} | {_cell(FAULTS[row.fault].sentence)} |"
    if row.skipped:
        return f"{names} | | | | | | | not measured: {_cell(row.skipped)} |"
    late = f"{row.late} ({row.late_excused})" if row.late_excused else str(row.late)
    right = "not" if row.right_after_s is None else f"{row.right_after_s:.1f} s"
    cells = [
        f"{row.requests:,}",
        str(row.failed),
        str(row.savable),
        late,
        right,
        "left" if row.load_left else "none left",
        f"{row.predicted - len(row.wrong)} of {row.predicted}",
        "missed" if row.missed else "met",
    ]
    return f"{names} {' | '.join(cells)} |"


def _machine(rows: Sequence[Row], machine: Mapping[str, str]) -> str:
    commits = ", ".join(sorted({row.commit for row in rows if row.commit}))
    of = f", of commit {commits}" if commits else ""
    return (
        f"## The machine\n\n{machine['cores']} cores of {machine['processor']}, Python {machine['python']}{of}. All "
        "processes, clients and proxies share them.\n"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    write(results.FILE, PAGE)
