"""The page: the facts of the measurements, then the sections."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from bench.report.inputs import Results
from bench.report.tables import Column, Group, Line, table, text

_CSS = """
:root { color-scheme: light dark; --ink: #1c2128; --soft: #59636e; --page: #f6f7f9; --card: #fff; --line: #d8dde3;
  --ours: #2f81f71c; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --soft: #9aa5b1; --page: #0f1318; --card: #181e25;
  --line: #313a44; --ours: #2f81f733; --bad: #ff8a7a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.9rem; }
h2 { margin: 0 0 .5rem; font-size: 1.3rem; }
h3 { margin: 1.75rem 0 0; font-size: 1.05rem; }
a { color: inherit; }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; list-style: none; }
section { margin: 1.5rem 0; padding: 1.25rem 1.5rem 1.5rem; background: var(--card); border: 1px solid var(--line);
  border-radius: .6rem; }
p { margin: .4rem 0; max-width: 48rem; }
code { padding: .1em .35em; border-radius: .3em; background: var(--page); border: 1px solid var(--line);
  font: .88em ui-monospace, monospace; overflow-wrap: anywhere; }
figure { margin: 1.25rem 0; }
figcaption, .command, caption { color: var(--soft); font-size: .9rem; }
svg { display: block; width: 100%; min-width: 38rem; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
.scroll { overflow-x: auto; }
table { width: 100%; margin: 1rem 0 0; border-collapse: collapse; font-size: .88rem;
  font-variant-numeric: tabular-nums; }
caption { padding: .25rem 0; text-align: left; }
th, td { padding: .3rem .55rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
thead th { vertical-align: bottom; }
tbody th { font-weight: 400; white-space: nowrap; }
.number { text-align: right; white-space: nowrap; }
thead .number { white-space: normal; }
.better { white-space: nowrap; }
.group th { padding-top: 1rem; font-weight: 600; }
.ours { background: var(--ours); }
.ours th { font-weight: 600; }
.reference { color: var(--soft); font-style: italic; }
.invalid td, .invalid th { color: var(--bad); text-decoration: line-through; }
.invalid td:last-child { min-width: 11rem; text-decoration: none; font-weight: 600; }
strong { padding: .05em .3em; border-radius: .3em; background: var(--ink); color: var(--card); }
.missing { border-style: dashed; }
.left-out { color: var(--bad); }
"""


@dataclass(frozen=True)
class Section:
    """`body` is HTML, or None if there is no file. The other fields are text."""

    title: str
    shows: str
    better: str
    command: str
    file: str
    body: str | None = None
    results: Results = field(default_factory=lambda: Results([]))

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", self.file.removesuffix(".json"))


def page(title: str, sections: Sequence[Section]) -> str:
    links = "".join(f'<li><a href="#{each.anchor}">{escape(each.title)}</a></li>' for each in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head><body>"
        f"<header><h1>{escape(title)}</h1><nav><ul>{links}</ul></nav></header>"
        f"<main>{_facts(sections)}{''.join(map(_section, sections))}</main></body></html>\n"
    )


def _facts(sections: Sequence[Section]) -> str:
    """The machine and the versions of each section, and the missing files."""
    there = [each for each in sections if each.body is not None]
    columns = [Column(name, numeric=False) for name in ("File", "Commit", "Machine", "Versions")]
    lines = [Line([text(cell) for cell in _fact_cells(each)]) for each in there]
    parts = ["<h2>What was measured where</h2>"]
    if there:
        parts.append(table("By file of results", columns, [Group(lines)]))
    commits = {str(each.results.machine.get("commit")) for each in there}
    if len(commits) > 1:
        parts.append("<p>These are results of different commits.</p>")
    parts += [
        f"<p>Missing: {escape(each.file)}, made by <code>{escape(each.command)}</code>.</p>"
        for each in sections
        if each.body is None
    ]
    parts.append(
        "<p>The best value of a column is <strong>emphasised</strong>, whoever has it. References, invalid runs and "
        "lines where more than 1&nbsp;% of the requests failed are shown and do not compete.</p>"
    )
    return f'<section id="facts">{"".join(parts)}</section>'


def _fact_cells(section: Section) -> list[str]:
    machine = dict(section.results.machine)
    commit = str(machine.pop("commit", "unknown") or "unknown")
    return [section.file, commit, _listed(machine), _listed(section.results.versions)]


def _listed(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value not in ("", None))


def _section(section: Section) -> str:
    if section.body is None:
        kind, reproduced, body = ' class="missing"', "Make it with", f"<p>There is no {escape(section.file)} yet.</p>"
    else:
        kind, reproduced, body = "", "Reproduce it with", section.body or "<p>Its file has no rows.</p>"
    body += "".join(f'<p class="left-out">Left out: {escape(each)}</p>' for each in section.results.left_out)
    return (
        f'<section id="{section.anchor}"{kind}><h2>{escape(section.title)}</h2>'
        f"<p>{escape(section.shows)} {escape(section.better)}</p>"
        f'<p class="command">{reproduced} <code>{escape(section.command)}</code></p>{body}</section>'
    )
