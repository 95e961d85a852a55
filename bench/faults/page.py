"""Writes docs/evidence/faults.md from the measured rows.

    python -m bench.faults.page

writes the page again without measuring anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import orjson

from bench.faults import results
from bench.faults.fault import LATE_AFTER_S
from bench.faults.load import (
    ANSWER_TOKENS,
    CONTEXTS,
    DECODE_S,
    IMPATIENT_AFTER_S,
    LONGEST_PAUSE_S,
    RATE_PER_S,
    STREAM_TOKENS,
)
from bench.faults.problems import STEADY_S
from bench.faults.processes import HANG_LATE_AFTER_S
from bench.faults.queue import CAP, CAP_AGAIN_WITHIN_S, CLIENTS, QUEUE_S
from bench.faults.row import LEAST_WAITING, Row, Section
from bench.faults.table import FAULTS, measured_with
from bench.faults.verdicts import PREFILL_S

_HEAD = f"""# Faults

What clients see when something dies, hangs or lies, and how long it takes until all is right again. This page is
written by `.venv/bin/python -m bench.faults`. What KVGate promises is in [behaviour/](../behaviour/README.md), what you
see of a fault in logs and metrics in [watch.md](../how-to/watch.md#what-you-see-of-each-fault).

Each fault strikes a cluster of its own, of real processes on one machine: Redis, three simulated replicas with an
agent each, and gateways with their default settings. In a section with 64 replicas (`--replicas 64`), the other 61 and
their agents share one process that no fault strikes; in the row of Redis' clock, they are left out. There the same load
reaches some 50 replicas, and the struck one may carry few requests or none.

A load balancer spreads {RATE_PER_S:g} requests a second on the gateways. Half of the requests are streams. Their
prompts share {CONTEXTS} beginnings of 1 300 tokens. Streams have {STREAM_TOKENS[0]} to {STREAM_TOKENS[1]} tokens and
take {STREAM_TOKENS[0] * DECODE_S:.0f} to {STREAM_TOKENS[1] * DECODE_S:.0f} s, other answers take
{ANSWER_TOKENS[0] * DECODE_S:.1f} to {ANSWER_TOKENS[1] * DECODE_S:.1f} s. The balancer asks each gateway's /ready once a
second. Where a gateway refuses the connection, it tries the next one. It never repeats a request that it has sent.

## What is counted

**failed**: requests that got no whole answer. They got another status than 200, or a stream with an error event, or
their connection broke.

**could have been saved**: the failed requests that the fault did not destroy by itself. It destroys these:
- answers that are no streams, and had begun on a replica that the fault struck;
- requests whose connection broke because their gateway, or the link to it, was struck.

A process that is told to stop destroys none: it may finish its requests. Every fault leaves one gateway and two
replicas unharmed.

**late**: answers that came more than {LATE_AFTER_S:g} s late. In a stream, that is the time from the request to the
first token, or from one token to the next. In another answer, it is the time beyond what its tokens take. The number
in brackets counts answers that could not come sooner. They are no part of the goal. They were:
- at a gateway that was struck, or on the link to it;
- or at a replica that was struck while it answered them: the client had received a byte (and it was no stream), or the
  replica had received the request {PREFILL_S:g} s before.

For 10 s nobody can tell a replica that hangs from one that computes a long prompt. In that row, an answer is late after
{HANG_LATE_AFTER_S:g} s.

**exact again**: seconds until the last moment at which anything was wrong. After it, all was right for {STEADY_S:g}
s. If a gateway or agent is killed, the seconds count from the fault. Otherwise they count from its end:
the frozen process continues, or Redis or the replica answers again. These states are wrong:
- a gateway that does not answer, or that is not exact on a replica;
- a second in which more than one request in ten was placed without the map;
- a load in Redis that is not the sum of its reservations, or that is a quarter off what clients have under way;
- a lease or an open breaker that ends later than any can.

**load**: whether any load is left in Redis once all requests have ended.

**predictions**: at the end, each beginning is asked for once more. Its prediction is right if it was decided
`exact`ly, and the engine's `cached_tokens` lie between what the map foretold and the prompt's next boundary, give or
take a block.

Goals: none that could have been saved, none late, no load left, all predictions right; exact again within 5 s
(gateways, agents, links) or 2 s (Redis, the link to it). A replica has no such time: its engine has to
start.

Links lead through a proxy while they are struck. Where bytes go one way only, TCP's own probes find the proxy alive:
connections stay open and silent. Redis' clock is stepped for KVGate's scripts alone: nothing else reads it.

## Sections with waiting requests

With `--waiting`, each replica takes {CAP} requests at once (`policy.max_active_requests`), and {CLIENTS} clients send
more. A client sends its next request within {LONGEST_PAUSE_S:g} s after the end of its last one, and
{IMPATIENT_AFTER_S:g} s after its start if it has not ended. Their streams have
{ANSWER_TOKENS[0]} to {ANSWER_TOKENS[1]} tokens, as other answers have: with long ones, the queue would only grow.
So requests wait in KVGate's queue all the time (`queue.wait_s` is 60 s), about 11 of them, and 16 when a replica is
away. One fault more, garbage-queue, strikes the keys of the queue itself. The following is counted in
another way, or in addition.

**late**: what the queue explains is no lateness. Two replicas serve 16 waiting requests in {QUEUE_S:g} s. So an answer
is late after {LATE_AFTER_S + QUEUE_S:g} s instead of {LATE_AFTER_S:g} s, and in the row of the replica that hangs after
{HANG_LATE_AFTER_S + QUEUE_S:g} s. This is the time that the client sees, so a request that loses its turn is late.

**waited**: requests that had to wait, and the longest wait before the last attempt, as the answers say (without those
in brackets under late). Of those that were placed in Redis, at least half must have waited, and at least
{LEAST_WAITING} must wait when the fault strikes.

**most at a replica**: requests in flight as Redis counts them, looked at 20 times a second; in brackets, requests that
an engine had, if that was more. The goal is {CAP}. Requests above it do not count while as many run that gateways had
placed without Redis. A fault after which Redis does not know all running requests excuses more, until
{CAP_AGAIN_WITHIN_S:g} s after its end. The number behind the slash is the last moment of more, in seconds from the
fault's end.

**load and queue**: the load as above. Besides, no key of the queue is left in Redis: no seat, turn, line, charge or
grant, whether its gateway lives or has died.
"""
PAGE = Path("docs/evidence/faults.md")
_COLUMNS = "| name | fault | requests | failed | could have been saved | late | exact again | load | predictions | |"
_WAITING_COLUMNS = (
    "| name | fault | requests | waited | failed | could have been saved | late | most at a replica | exact again "
    "| load and queue | predictions | |"
)


def page(rows: Sequence[Row], machine: Mapping[str, str]) -> str:
    """The page in Markdown."""
    parts = [_HEAD]
    for section, some in groupby(rows, key=lambda row: row.section):
        parts.append(_section(section, list(some)))
    parts.append(_machine(rows, machine))
    return "\n".join(parts)


def write(file: Path, to: Path) -> None:
    """Writes the page from a results file. Raises OSError, and ValueError if the file is not a results file."""
    to.write_text(page(results.read(file), orjson.loads(file.read_bytes())["machine"]))


def _section(section: Section, rows: Sequence[Row]) -> str:
    columns = _WAITING_COLUMNS if section.waits else _COLUMNS
    waiting = ", with waiting requests" if section.waits else ""
    lines = [f"## {section.gateways} gateways, {section.replicas} replicas{waiting}", "", columns]
    lines += ["|---" * (columns.count("|") - 1) + "|", *map(line, rows), ""]
    missed = [row for row in rows if row.missed]
    measured = [row for row in rows if not row.skipped]
    lines += [f"{len(measured) - len(missed)} of {len(measured)} faults met all goals.", ""]
    lines += _resumed(measured)
    unmeasured = [
        name for name in measured_with(section.gateways, section.waits) if name not in {row.fault for row in measured}
    ]
    if unmeasured:
        lines += [f"Not measured on this version yet: {', '.join(unmeasured)}.", ""]
    if missed:
        lines += ["Missed:", ""]
        lines += [f"- {row.fault}: {_cell('; '.join(row.missed))}" for row in missed]
        lines.append("")
    return "\n".join(lines)


def _resumed(rows: Sequence[Row]) -> list[str]:
    """How many of the broken streams went on elsewhere, if any broke."""
    broken = sum(row.streams_broken or 0 for row in rows)
    if not broken:
        return []
    went_on = sum(row.streams_went_on for row in rows)
    return [f"{went_on} of {broken} streams that a replica broke off went on at another one.", ""]


def line(row: Row) -> str:
    """A fault's row in the table."""
    names = f"| {row.fault} | {_cell(FAULTS[row.fault].sentence)} |"
    if row.skipped:
        empty = " |" * (9 if row.waits else 7)
        return f"{names}{empty} not measured: {_cell(row.skipped)} |"
    late = f"{row.late} ({row.late_excused})" if row.late_excused else str(row.late)
    right = "not" if row.right_after_s is None else f"{row.right_after_s:.1f} s"
    cells = [
        f"{row.requests:,}",
        *([f"{row.waited}, {row.longest_wait_s:.1f} s"] if row.waits else []),
        str(row.failed),
        str(row.savable),
        late,
        *([_most(row)] if row.waits else []),
        right,
        "left" if row.load_left or row.seats_left else "none left",
        f"{row.predicted - len(row.wrong)} of {row.predicted}",
        "missed" if row.missed else "met",
    ]
    return f"{names} {' | '.join(cells)} |"


def _most(row: Row) -> str:
    """The most requests at a replica; if they were more than it takes, until when."""
    running = f" ({row.most_running})" if row.most_running > row.most_active else ""
    until = "" if row.over_cap_until_s is None else f" / {row.over_cap_until_s:.1f} s"
    return f"{row.most_active}{running}{until}"


def _machine(rows: Sequence[Row], machine: Mapping[str, str]) -> str:
    commits: dict[str, str] = {}
    for row in rows:  # several commits may have the same code: name the one without other changes
        commits[row.code] = min(commits.get(row.code, row.commit), row.commit, key=len)
    named = ", ".join(sorted(set(commits.values()) - {""}))
    of = f", of commit {named}" if named else ""
    return (
        f"## The machine\n\n{machine['cores']} cores of {machine['processor']}, Python {machine['python']}{of}. All "
        "processes, clients and proxies share them.\n"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    write(results.FILE, PAGE)
