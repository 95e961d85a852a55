"""How much of what an endless cache would find does each router find in recorded traffic?

    python -m bench.replay FILE [--quick] [--out OUT]
    python -m bench.replay FILE --requests 2000 --replicas 8,64 --caches 0.1,0.3,1 --systems prefix_kv_aware,round_robin
    python -m bench.replay FILE --window 600-1200 --tokens-per-block 128 --rate 1 --per-s 10
    python -m bench.replay FILE --prefills 4,5,6 --replicas 8 --caches 0.5 --requests 600 --per-s 3

FILE is .jsonl or .jsonl.gz in Mooncake's form, one request a line:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 2353, 2354]}

`timestamp` is in ms. Each id stands for a block of 512 prompt tokens (--recorded-tokens-per-block) and all blocks
before it. github.com/kvcache-ai/Mooncake has such files in FAST25-release/traces. A recording has no prompts: each
prompt is one user message, made from the ids, so that prompts share a prefix exactly as far as their ids agree.

Requests are sent at their times, whether earlier ones are answered or not. Three things are scaled, and the output says
how:
- tokens: --tokens-per-block makes prompts, answers, caches and the engines' rates smaller by one factor, so that shares
  and times stay the same. KVGate's weights, which are in tokens, stay as they are.
- rate: requests come so often that prefill with an endless cache keeps the engines --busy, or --rate times as often as
  recorded.
- time: all times of recording and engines are divided by the same number, so that this machine sends --per-s requests a
  second. The output converts them back, so a router's own time counts that many times as much.

The bound is what one endless cache finds of exactly the requests that are sent. --caches says how many times the caches
of all replicas together hold the distinct blocks of these requests: from a tenth (0.1) to all of them (1). The caches
are empty at the start. Answers need cache, too.

KVGate's prefix_kv_aware runs with --gateways gateways. KVGate has its defaults, except that a gateway takes any number
of requests, may wait 200 ms for Redis, and takes no replica for hung while it computes a long prompt. Other routers
(`python -m bench.overhead --install`) run with their defaults. A run is invalid if the machine was less than 20 % idle:
its times are those of the machine. Then lower --per-s or --tokens-per-block.

With --prefills, only KVGate's prefix_kv_aware runs, before simulated replicas (bench/replay/roles.py): once with
replicas that all do everything, and once with so many that only compute prompts. A prompt that is computed delays the
tokens of the answers beside it, in contrast to the other replays.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
from argparse import ArgumentTypeError
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from bench import record, tables
from bench.fleet.gateways import NotReady
from bench.load import BLOCK_TOKENS
from bench.options import amounts, count, counts, names, positive
from bench.peers import DoesNotStart
from bench.replay import trace as recorded
from bench.replay.fleet import Setup, prefill_load, running_fleet, setup
from bench.replay.measure import GOALS, Row, measure
from bench.replay.prompts import findable_tokens, sent_tokens
from bench.replay.roles import running_roles
from bench.replay.trace import BadTrace, Trace, read_trace
from bench.routing.systems import NAMES, OURS, ROUTERS, System, label, systems
from bench.scaled_time import INVALID

_NAMES = tuple(name for name in NAMES if name != "pinned")  # pinning needs to know a request's conversation
_DEFAULT = (OURS, "round_robin", "consistent_hash", *(name for name in ROUTERS if not name.endswith("-tight")))
_QUICK = {"requests": "1000", "replicas": "8", "caches": "0.3,1", "systems": f"{OURS},round_robin"}
_LEGEND = (
    "of bound: found tokens, as a share of those that one endless cache finds. cached: of the prompts' tokens. "
    "busiest: the busiest replica's requests (or prompt tokens that it computed), divided by the mean. cv: the "
    f"coefficient of variation over replicas. idle: the idle share of the machine. {INVALID}."
)


def _window(text: str) -> tuple[float, float]:
    """An argparse type: `600-1200`."""
    first, _, last = text.partition("-")
    try:
        from_s, to_s = float(first), float(last)
    except ValueError:
        from_s = to_s = 0.0
    if not 0 <= from_s < to_s:
        raise ArgumentTypeError(f"seconds of the recording, as in 600-1200, not {text!r}")
    return from_s, to_s


def _block_tokens(text: str) -> int:
    """An argparse type: a multiple of the engines' block."""
    tokens = count(text)
    if tokens % BLOCK_TOKENS:
        raise ArgumentTypeError(f"a multiple of the engines' {BLOCK_TOKENS} tokens, not {text!r}")
    return tokens


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the recording")
    parser.add_argument("--requests", type=count, help="only the first so many requests, of the window if there is one")
    parser.add_argument("--window", type=_window, help="only these seconds of the recording, as in 600-1200")
    parser.add_argument("--replicas", type=counts, default="8,64", help="default: %(default)s")
    parser.add_argument("--caches", type=amounts, default="0.1,0.3,1", help="default: %(default)s")
    parser.add_argument("--systems", type=names(_NAMES), default=",".join(_DEFAULT), help="default: %(default)s")
    parser.add_argument("--gateways", type=counts, default="2", help="of prefix_kv_aware (default: %(default)s)")
    parser.add_argument("--prefills", type=counts, default="", help="replicas that only compute prompts")
    parser.add_argument("--tokens-per-block", type=_block_tokens, default="64", help="as sent (default: %(default)s)")
    parser.add_argument(
        "--recorded-tokens-per-block",
        type=_block_tokens,
        default=str(recorded.BLOCK_TOKENS),
        help="in FILE (default: %(default)s)",
    )
    parser.add_argument("--busy", type=positive, default=0.6, help="share of the engines' time (default: %(default)s)")
    parser.add_argument("--rate", type=positive, help="multiplies the recorded rate; then --busy does not count")
    parser.add_argument(
        "--per-s", type=positive, default=20.0, help="requests/s on this machine (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the choice of a gateway (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"in some minutes: {_shown(_QUICK)}, unless given")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**_QUICK)
    return parser.parse_args()


def _shown(options: dict[str, str]) -> str:
    return " ".join(f"--{name} {value}" for name, value in options.items())


def _cut(options: argparse.Namespace) -> Trace:
    """The part of the recording to replay, before scaling. Raises BadTrace."""
    trace = read_trace(options.file, options.recorded_tokens_per_block)
    if options.window:
        trace = trace.window(*options.window)
    trace = trace.first(options.requests) if options.requests else trace
    if trace.span_s == 0:
        raise BadTrace(f"all of its {len(trace.requests)} requests came at the same time, so they have no rate")
    return trace


def scaling(cut: Trace, sent: Trace, per_s: float) -> list[str]:
    """What is sent, and what was scaled."""
    count, tokens = len(cut.requests), sum(map(sent_tokens, sent.requests))
    template_tokens = tokens // count - sent.input_tokens // count
    recorded = (
        f"recorded: {count} requests in {cut.span_s:.0f} s, {cut.input_tokens / count:.0f} prompt tokens on average, "
        f"{cut.distinct_blocks} distinct blocks; an endless cache finds {cut.repeated_tokens / cut.input_tokens:.1%}"
    )
    scaled = (
        f"tokens: {sent.block_tokens} here for {cut.block_tokens} of the recording, in prompts, answers, caches and "
        f"rates; the chat template adds {template_tokens} to each prompt"
    )
    time = f"time: scaled so that this machine sends {per_s:g} requests/s; all times are converted back"
    bound = f"bound: one endless cache finds {findable_tokens(sent) / tokens:.1%} of the tokens that are sent"
    return [recorded, scaled, time, bound]


def _roles_table(setup: Setup, rows: Sequence[Row]) -> Table:
    columns = ["of bound", "first p50", "p95", "p99 ms", "token p50", "p99 ms", "stall p50", "p99 ms"]
    columns += [f"{first_s:g} s {token_ms:g} ms" for first_s, token_ms in GOALS]
    title = f"{setup.prefills} of {setup.replicas} replicas only compute prompts; times divided by {setup.speed:.3g}"
    shown = tables.table(title, ("system",), [*columns, "late p99 ms", "idle"])
    for row in rows:
        times_ms = row.ttft_p50_ms, row.ttft_p95_ms, row.ttft_p99_ms, row.token_p50_ms, row.token_p99_ms
        shown.add_row(
            label(row.system, row.instances),
            f"{row.of_bound:.1%}",
            *(f"{each:.0f}" for each in (*times_ms, row.stall_p50_ms, row.stall_p99_ms)),
            *(f"{each:.1%}" for each in row.good),
            f"{row.late_p99_ms:.0f}",
            f"{row.idle:.0%}",
        )
    return shown


def _table(setup: Setup, trace: Trace, rows: Sequence[Row]) -> Table:
    if setup.prefills is not None:
        return _roles_table(setup, rows)
    least, most = (setup.rate * each for each in prefill_load(trace, setup.replicas, setup.tokens_scale))
    title = (
        f"{setup.replicas} replicas that hold {setup.held:g} of the distinct blocks; {setup.rate:.3g} times the "
        f"recorded rate: prefill keeps engines {least:.0%} busy with an endless cache, {most:.0%} without; times "
        f"divided by {setup.speed:.3g}"
    )
    columns = ["of bound", "cached", "p50", "p95", "p99 ms", "busiest req", "cv", "busiest tok", "cv", "idle"]
    if any(row.failed for row in rows):
        columns.append("failed")
    shown = tables.table(title, ("system",), columns, caption=_LEGEND)
    for row in rows:
        name = label(row.system, row.instances)
        shown.add_row(
            name if row.valid else f"{name} [red](invalid)",
            f"{row.of_bound:.1%}",
            f"{row.cache_share:.1%}",
            *(f"{each:.0f}" for each in (row.ttft_p50_ms, row.ttft_p95_ms, row.ttft_p99_ms)),
            *(f"{each:.2f}" for each in (row.requests_busiest, row.requests_cv, row.computed_busiest, row.computed_cv)),
            f"{row.idle:.0%}",
            *([str(row.failed)] if "failed" in columns else []),
        )
    return shown


def run(
    trace: Trace, setups: Sequence[Setup], routed_by: Sequence[System], seed: int, found: record.Found[Row]
) -> None:
    """Replays the trace through every system, with each fleet anew. Saves after each fleet."""
    with record.progress(found.console) as progress:
        task = progress.add_task("", total=len(setups) * len(routed_by))
        for setup in setups:
            if refusal := setup.refusal(trace):
                found.leave_out(refusal)
                found.save()
                progress.advance(task, len(routed_by))
                continue
            rows: list[Row] = []
            for system in routed_by:
                what = f"{setup.replicas} replicas, {setup.held:g} of the blocks, {system.label}"
                start = running_fleet if setup.prefills is None else running_roles
                progress.update(task, description=what)
                try:
                    with start(setup, trace) as fleet:
                        rows.append(asyncio.run(measure(fleet, trace, setup, system, seed)))
                except (DoesNotStart, NotReady, RuntimeError, OSError, httpx.HTTPError) as error:
                    found.leave_out(f"{what}: {error}")
                progress.advance(task)
            found.rows += rows
            found.console.print(_table(setup, trace, rows))
            found.save()


def _raise_open_files() -> None:
    """Lets the client have as many connections as the system allows: requests of an overloaded fleet pile up."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    record.begin()
    _raise_open_files()
    options = _options()
    console = Console()
    try:
        cut = _cut(options)
    except BadTrace as error:
        raise SystemExit(str(error)) from error
    sent = cut.scaled(options.tokens_per_block)
    versions = {"kvgate": metadata.version("kvgate")} | {name: peer.version for name, peer in ROUTERS.items()}
    said = scaling(cut, sent, options.per_s)
    found = record.Found[Row](versions, options.out, console, facts={"trace": options.file.name, "scaling": said})
    console.print("\n".join(said), highlight=False)
    routed_by = systems([OURS] if options.prefills else options.systems, options.gateways)
    for system in routed_by:
        if system.missing:
            found.leave_out(f"{system.label}: {system.missing}")
    tokens_scale = sent.block_tokens / cut.block_tokens
    setups = [
        setup(sent, replicas, held, tokens_scale, options.busy, options.rate, options.per_s, prefills)
        for replicas in options.replicas
        for held in options.caches
        for prefills in ((0, *options.prefills) if options.prefills else (None,))
    ]
    run(sent, setups, [system for system in routed_by if not system.missing], options.seed, found)


if __name__ == "__main__":
    main()
