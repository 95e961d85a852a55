"""Compares two runs of bench.attacks in the table of docs/evidence/attacks.md.

    python -m bench.attacks.compare bench/results/attacks-before.json bench/results/attacks.json

With one file, the other column stays empty.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import orjson

from bench.attacks.row import BACK_WITHIN_MB


def cell(row: dict[str, Any] | None) -> str:
    """The cost of an attack in few words. Empty if the run does not have the attack."""
    if row is None:
        return ""
    if row["is_killed"] or not row["is_alive"]:
        return "killed: too much memory" if row["is_killed"] else "the gateway died"
    kept_mb = row["after_mb"] - row["before_mb"]
    refused = sum((row["honest_refused"] or {}).values())
    parts = [f"{row['held_ms']:,.0f} ms, +{row['peak_mb'] - row['before_mb']:,.0f} MB"]
    parts += [f"{kept_mb:,.0f} MB kept"] if kept_mb > BACK_WITHIN_MB else []
    parts += [f"{refused:,} refused"] if refused else []
    return "; ".join([*parts, row["got"].replace("|", "\\|")])


def table(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """A Markdown table with a line for each attack of either run."""
    columns = [{row["attack"]: row for row in rows} for rows in (before, after)]
    sent = {row["attack"]: row["sent"] for row in [*before, *after]}
    lines = ["| what is sent | before | after |", "|---|---|---|"]
    lines += [f"| {sent[name]} | {' | '.join(cell(column.get(name)) for column in columns)} |" for name in sent]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.attacks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?")
    options = parser.parse_args()
    before, after = (
        orjson.loads(path.read_bytes())["rows"] if path is not None else [] for path in (options.before, options.after)
    )
    print(table(before, after))


if __name__ == "__main__":
    main()
