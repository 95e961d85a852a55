"""Writes one self-contained HTML page of the existing results, and tells how to make the missing ones.

python -m bench.report [--results bench/results] [--out bench/results/report.html]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bench.report import growth, overhead, place, routing, store
from bench.report.inputs import Results, Unreadable, read
from bench.report.page import Section, page

_FOLDER = Path("bench/results")


@dataclass(frozen=True)
class Source:
    """A file of results and the section made from it. `make bench-` plus its stem makes the file."""

    stem: str
    title: str
    shows: str
    better: str
    render: Callable[[Results], str]

    def section(self, folder: Path) -> Section:
        file, command = f"{self.stem}.json", f"make bench-{self.stem}"
        section = Section(self.title, self.shows, self.better, command, file)
        try:
            results = read(folder / file)
            if results is None:
                return section
            body = self.render(results) if results.rows else ""
        except Unreadable as error:
            raise SystemExit(f"{folder / file} is not what {command} writes: {error}") from None
        return replace(section, command=results.command or command, body=body, results=results)


_SOURCES = (
    Source(
        "routing",
        "Routing: time to first token and cache share",
        "How soon requests of each mix get their first token, and how much of their prompts the engines' caches "
        "serve, by what routes them.",
        "Lower TTFT is better; higher cache share and requests per s are.",
        routing.render,
    ),
    Source(
        "routing-mixes",
        "Routing: documents, a hot prefix, nothing in common",
        "The same of mixes in which other things are hard: many documents, more of them than the caches hold, one that "
        "everybody asks about, and prompts of which no two are alike.",
        "Lower TTFT is better; higher cache share and requests per s are.",
        routing.render,
    ),
    Source(
        "routing-real",
        "Routing on real vLLM",
        "The same on two real vLLM servers with a small vision-language model, on the processors of one machine, which "
        "the gateways share with them.",
        "Lower TTFT is better; higher cache share and requests per s are.",
        routing.render,
    ),
    Source(
        "overhead",
        "CPU per request against the peers",
        "What a request costs each proxy, what it adds to the time to the first byte, and how many it serves.",
        "Lower is better, except for requests per s. Clients in closed loops fill the machine, and latency is mostly "
        "waiting: what a proxy adds to it is seen at fixed rates.",
        overhead.render,
    ),
    Source(
        "overhead-latency",
        "Latency at fixed rates",
        "What each proxy adds to the time to the first byte while requests come at a steady rate, and its cost.",
        "Lower is better.",
        overhead.render,
    ),
    Source(
        "place",
        "Cost of a placement",
        "How much of Redis' time one routing decision takes, by length of the prompt's chain of keys, number of "
        "replicas, and how much of the chain is known (known: three replicas own all of it; shared: every replica owns "
        "half).",
        "Lower is better.",
        place.render,
    ),
    Source(
        "fleet-grid",
        "How the cost of a request grows",
        "What a request costs gateways and Redis, with 1 to 50 gateways and 8 to 1 000 replicas, and what "
        "they use without requests.",
        "Flat is good.",
        growth.render,
    ),
    Source(
        "store",
        "The store",
        "What the shared store does and costs.",
        "An arrow says whether lower or higher is better; rows are of different things and do not compete.",
        store.render,
    ),
)


def report(folder: Path) -> str:
    return page("KVGate: what was measured", [source.section(folder) for source in _SOURCES])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=_FOLDER, help="a folder of JSON files (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="default: report.html in that folder")
    options = parser.parse_args()
    if not options.results.is_dir():
        parser.error(f"--results: there is no folder {options.results}")
    out: Path = options.out or options.results / "report.html"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(report(options.results), encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
