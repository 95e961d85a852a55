"""One self-contained HTML page of the results that are there, and how to make those that are not.

python -m bench.report [--results bench/results] [--out bench/results/report.html]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bench.report import overhead, place, routing, store
from bench.report.inputs import Results, Unreadable, read
from bench.report.page import Section, page

_FOLDER = Path("bench/results")
_MIXES = "images,vqa,chat"
_AT_A_RATE = "--contenders direct,nginx,kvgate,sglang-router,vllm-router --connections '' --rates 200,1500"
_OTHER_MIXES = "contexts,rag,hostile,hot,tail-1.5,tail-3"


@dataclass(frozen=True)
class Source:
    """A file of results, and what it becomes."""

    file: str
    module: str
    title: str
    shows: str
    better: str
    render: Callable[[Results], str]

    def section(self, folder: Path) -> Section:
        command = f"python -m {self.module} --out {folder / self.file}"
        section = Section(self.title, self.shows, self.better, command, self.file)
        try:
            results = read(folder / self.file)
            if results is None:
                return section
            body = self.render(results) if results.rows else ""
        except Unreadable as error:
            raise SystemExit(f"{folder / self.file} is not what {self.module} writes: {error}") from None
        return replace(section, command=results.command or command, body=body, results=results)


_SOURCES = (
    Source(
        "routing.json",
        f"bench.routing --mixes {_MIXES}",
        "Routing: time to first token and cache share",
        "How soon requests of each mix get their first token, and how much of their prompts the engines' caches "
        "serve, by what routes them.",
        "Lower TTFT is better; higher cache share and requests per s are.",
        routing.render,
    ),
    Source(
        "routing-mixes.json",
        f"bench.routing --mixes {_OTHER_MIXES}",
        "Routing: documents, a hot prefix, nothing in common",
        "The same of mixes in which other things are hard: many documents, more of them than the caches hold, one that "
        "everybody asks about, and prompts of which no two are alike.",
        "Lower TTFT is better; higher cache share and requests per s are.",
        routing.render,
    ),
    Source(
        "routing-real.json",
        "bench.routing --real",
        "Routing on real vLLM",
        "The same on two real vLLM servers with a small vision-language model, on the processors of one machine, which "
        "the gateways share with them.",
        "Lower TTFT is better; higher cache share and requests per s are.",
        routing.render,
    ),
    Source(
        "overhead.json",
        "bench.overhead --quick",
        "CPU per request against the peers",
        "What a request costs each proxy, what it adds to the time to the first byte, and how many it serves.",
        "Lower is better, except for requests per s. Clients in closed loops fill the machine, and latency is mostly "
        "waiting: what a proxy adds to it is seen at fixed rates.",
        overhead.render,
    ),
    Source(
        "overhead-latency.json",
        f"bench.overhead {_AT_A_RATE} --prompts '350 B' --answers 'plain,stream 16'",
        "Latency at fixed rates",
        "What each proxy adds to the time to the first byte while requests come at a steady rate, and its cost.",
        "Lower is better.",
        overhead.render,
    ),
    Source(
        "place.json",
        "bench.place",
        "Cost of a placement",
        "How much of Redis' time one routing decision takes, by length of the prompt's chain of keys, number of "
        "replicas, and how much of the chain is cached (warm: all, half, cold: nothing).",
        "Lower is better.",
        place.render,
    ),
    Source(
        "store.json",
        "bench.store",
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
