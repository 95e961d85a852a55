"""Measures the cost of a request in a proxy, for KVGate and others, in one run on one machine.

    python -m bench.overhead [--quick] [--install] [--out FILE]
    python -m bench.overhead --contenders kvgate,sglang-router --prompts '350 B' --answers 'stream 16' --connections 8
    python -m bench.overhead --contenders kvgate --beside ../kvgate-before --rounds 5 --connections 8
    python -m bench.overhead --contenders kvgate --without resume --calls --rounds 10 --connections 8
    python -m bench.overhead --contenders 'kvgate,envoy + picker' --prompts '100k tokens' \\
        --answers 'stream 1000 paced' --connections '' --rates 10 --seconds 20 --replicas 10

The proxies run side by side and take turns, so that changes of the machine's speed affect all of them alike. The full
grid takes hours, --quick three minutes. CPU is the time of the proxy's processes alone, without the client and the
upstream. Requests/s depend on this machine, which all of them share. Envoy and its picker are one proxy; the JSON has
the picker's part as `picker_cpu_us`, and how long placements take.
"""

from __future__ import annotations

import argparse
import subprocess
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import record, tables
from bench.options import amounts, count, counts, names, positive
from bench.overhead.calls import INSTALL
from bench.overhead.cell import Compared, Figures, Row, Shape, compared, measure, median_of
from bench.overhead.contenders import BESIDE, CONTENDERS, PARTS, of_checkout, without
from bench.overhead.shapes import ANSWERS, OF_PUBLISHED_RUNS, PROMPTS
from bench.overhead.upstreams import upstreams
from bench.peers import PEERS, DoesNotStart

_QUICK = {"prompts": "350 B,26 KB", "answers": "plain,stream 16,stream 16 paced", "connections": "8", "rates": "200"}
_BESIDE = ("CPU ratio", "calls ratio", "more B/conn")
"""What is shown of a contender that is compared with another one."""


def _shapes(options: argparse.Namespace) -> list[Shape]:
    loads = [(count, 0.0) for count in options.connections] + [(0, rate) for rate in options.rates]
    return [Shape(prompt, answer, *load) for prompt in options.prompts for answer in options.answers for load in loads]


def _beside(found: Compared) -> tuple[str, str, str]:
    calls = f"{found.calls_ratio:.3f}" if found.calls_ratio else ""
    return f"{found.cpu_ratio:.3f} ± {found.cpu_ratio_error:.3f}", calls, str(found.more_bytes)


def _table(rows: list[Row]) -> Table:
    columns = ["CPU us", "Redis us", "req/s", "first p50", "p99 ms"]
    if any(row.figures.picker_cpu_us for row in rows):
        columns.append("picker us")
    if any(row.figures.failed for row in rows):
        columns.append("failed")
    if any(row.figures.calls for row in rows):
        columns.append("calls")
    if any(row.compared is not None for row in rows):
        columns += _BESIDE
    title = "CPU per request, requests/s and time to the first byte: medians"
    table = tables.table(title, ("prompt", "answer", "load", "proxy"), columns)
    above = None
    for row in rows:
        shape, figures = row.shape, row.figures
        load = f"{shape.rate_per_s:g}/s" if shape.rate_per_s else f"{shape.connections} conns"
        table.add_row(
            *(("", "", "") if shape == above else (shape.prompt, shape.answer, load)),
            row.contender,
            f"{figures.cpu_us:.0f}",
            f"{figures.store_cpu_us:.0f}",
            f"{figures.per_s:.0f}",
            f"{figures.first_byte_p50_ms:.2f}",
            f"{figures.first_byte_p99_ms:.2f}",
            *([f"{figures.picker_cpu_us:.0f}"] if "picker us" in columns else []),
            *([str(figures.failed)] if "failed" in columns else []),
            *([f"{figures.calls:.1f}"] if "calls" in columns else []),
            *(_beside(row.compared) if row.compared is not None else []),
        )
        above = shape
    return table


def run(options: argparse.Namespace, found: record.Found[Row]) -> None:
    """Measures every shape with every contender that can run here, side by side, in the given number of rounds."""
    shapes, proxies = _shapes(options), {}
    contenders = [CONTENDERS[name] for name in options.contenders]
    contenders += [of_checkout(options.beside)] if options.beside else []
    contenders += [without(options.without)] if options.without else []
    with ExitStack() as stack:
        urls = stack.enter_context(upstreams(options.replicas))
        for contender in contenders:
            reason = contender.missing()
            try:
                if not reason:
                    proxies[contender.name] = stack.enter_context(contender.start(urls))
            except DoesNotStart as error:
                reason = str(error)
            if reason:
                found.leave_out(f"{contender.name}: {reason}")
        found.versions = {name: proxy.version for name, proxy in proxies.items()}
        progress = stack.enter_context(record.progress(found.console))
        task = progress.add_task("", total=len(shapes) * len(proxies) * options.rounds)
        for shape in shapes:
            rounds: dict[str, list[Figures]] = {name: [] for name in proxies}
            for _ in range(options.rounds):
                for name, proxy in proxies.items():
                    progress.update(task, description=f"{shape.prompt}, {shape.answer}: {name}")
                    times = (options.warm_up_s, options.seconds)
                    rounds[name].append(measure(shape, proxy, urls[0], *times, counts_calls=options.calls))
                    progress.advance(task)
            found.rows += _rows(shape, rounds)


def _rows(shape: Shape, rounds: dict[str, list[Figures]]) -> list[Row]:
    rows = list[Row]()
    for name, figures in rounds.items():
        is_compared = name == "kvgate" and BESIDE in rounds
        beside = compared(figures, rounds[BESIDE], shape.connections) if is_compared else None
        rows.append(Row(shape, name, median_of(figures), beside))
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--contenders", type=names(CONTENDERS), default=",".join(CONTENDERS), help="default: %(default)s"
    )
    for name, known in (("--prompts", PROMPTS), ("--answers", ANSWERS)):
        usual = ",".join(each for each in known if each not in OF_PUBLISHED_RUNS)
        others = ", ".join(each for each in known if each in OF_PUBLISHED_RUNS)
        parser.add_argument(name, type=names(known), default=usual, help=f"default: {usual}; there is also: {others}")
    parser.add_argument(
        "--connections", type=counts, default="8,256", help="closed-loop clients, or '' (default: %(default)s)"
    )
    parser.add_argument("--replicas", type=count, default=2, help="canned servers (default: %(default)s)")
    parser.add_argument("--rates", type=amounts, default="", help="requests/s at fixed rates (default: none)")
    parser.add_argument(
        "--rounds", type=count, default=3, help="rounds of each cell; results are medians (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=positive, default=4.0, help="time of a cell after its warm-up (default: %(default)s)"
    )
    parser.add_argument("--warm-up-s", type=positive, default=1.0, help="warm-up of each cell (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="only the cells of `make bench-quick`")
    beside = parser.add_mutually_exclusive_group()
    beside.add_argument("--beside", type=Path, metavar="CHECKOUT", help="another KVGate, shown as `kvgate beside`")
    beside.add_argument("--without", choices=PARTS, help="`kvgate beside` is the same with this part switched off")
    parser.add_argument("--calls", action="store_true", help="count system calls, too (takes 3 s more for each cell)")
    parser.add_argument("--install", action="store_true", help="install the other routers first, from PyPI")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    options = parser.parse_args()
    if options.calls and INSTALL:
        parser.error(f"--calls needs strace: {INSTALL}")
    if options.quick:
        parser.set_defaults(**_QUICK)
        options = parser.parse_args()
    return options


def main() -> None:
    record.begin()
    options, console = _options(), Console()
    if options.install:
        for name in (name for name in options.contenders if name in PEERS):
            try:
                PEERS[name].install()
            except subprocess.CalledProcessError as error:
                console.print(f"{name} cannot be installed: {error}")
    found = record.Found[Row]({}, options.out, console)
    run(options, found)
    console.print(_table(found.rows))
    found.save()


if __name__ == "__main__":
    main()
