"""The plots of a mix: the distribution of TTFT, and the share of prompt tokens from the engines' caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter, StrMethodFormatter

from bench.report import figures
from bench.report.figures import INK, figure, style
from bench.report.runs import Measured
from bench.routing.measure import Row
from bench.routing.systems import label

_COLOURS = {
    "sglang-router": "#e08a00",
    "sglang-router-tight": "#b8860b",
    "vllm-router": "#009e73",
    "vllm-router-tight": "#56b4a0",
    "round_robin": "#cc79a7",
    "least_loaded": "#d55e00",
    "consistent_hash": "#9a7fd1",
    "random": figures.PEER,
}
_REFERENCE_DASHES = {"oracle": ":", "pinned": "--"}
_SIZE = (10, 3.8)


def ttft_distributions(title: str, measured: Sequence[Measured]) -> str:
    """Each system with its fewest and its most instances. The seeds are pooled."""
    shown = _fewest_and_most([each for each in measured if each.ttft_ms])
    if not shown:
        return ""
    told = []
    with style():
        drawn = Figure(figsize=_SIZE)
        axes = drawn.add_subplot()
        for each in shown:
            times_ms, asked = each.ttft_ms, sum(row.requests + row.failed for row in each.rows)
            shares = [(i + 1) / asked for i in range(len(times_ms))]
            axes.step([times_ms[0], *times_ms], [0.0, *shares], where="post", label=each.name, **_look(each))
            told.append(f"{each.name} {times_ms[len(times_ms) // 2]:.0f} ms")
        axes.set(xscale="log", xlabel="time to first token (ms, log scale)", ylabel="share of requests", ylim=(0, 1.01))
        _plain_ticks(axes)
        drawn.legend(loc="outside right center")
        alt = f"{title}: cumulative distribution of time to first token. Medians: {', '.join(told)}."
        caption = (
            "The share of requests whose first token came within a time; one that failed has none. Further left is "
            "better. All seeds together; xN, dotted: with N gateways, or instances of a peer, the most measured."
        )
        return figure(f"ttft {title}", drawn, alt, caption)


def _fewest_and_most(measured: Sequence[Measured]) -> list[Measured]:
    return [each for found in _by_system(measured) for each in (*found[:1], *found[1:][-1:])]


def _by_system(measured: Sequence[Measured]) -> list[list[Measured]]:
    """The runs of each system, from its fewest instances to its most."""
    of: dict[str, list[Measured]] = {}
    for each in measured:
        of.setdefault(each.system, []).append(each)
    return list(of.values())


def cache_shares(title: str, measured: Sequence[Measured]) -> str:
    """Lines for KVGate, round robin and systems with several numbers of instances. The references are level lines."""
    shown = [points for points in _by_system(measured) if _has_a_line(points)]
    if not shown:
        return ""
    told = []
    with style():
        drawn = Figure(figsize=_SIZE)
        axes = drawn.add_subplot()
        for points in shown:
            shares = [each.middle(_cache_share) for each in points]
            if points[0].is_reference:
                axes.axhline(shares[0], label=points[0].name, **_look(points[0]))
            else:
                _with_spread(axes, points, shares)
            told += [f"{each.name} {share:.0%}" for each, share in zip(points, shares, strict=True)]
        axes.set(xlabel="gateways, or instances of a peer", ylabel="cache share", ylim=(0, 1.03))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        drawn.legend(loc="outside right center")
        alt = f"{title}: cache share by number of instances. {', '.join(told)}."
        caption = (
            "The share of prompt tokens that the engines' caches served. Higher is better. "
            "Medians over seeds, the bars from the lowest to the highest."
        )
        return figure(f"cache {title}", drawn, alt, caption)


def _has_a_line(points: Sequence[Measured]) -> bool:
    first = points[0]
    return first.is_ours or first.is_reference or first.system == "round_robin" or len(points) > 1


def _with_spread(axes: Axes, points: Sequence[Measured], shares: Sequence[float]) -> None:
    below = [share - min(map(_cache_share, each.rows)) for each, share in zip(points, shares, strict=True)]
    above = [max(map(_cache_share, each.rows)) - share for each, share in zip(points, shares, strict=True)]
    axes.errorbar(
        [each.instances for each in points],
        shares,
        yerr=(below, above),
        label=label(points[0].system, 1),
        marker="o",
        markersize=4,
        capsize=3,
        **_look(points[0]),
    )


def _cache_share(row: Row) -> float:
    return row.cache_share


def _plain_ticks(axes: Axes) -> None:
    """1, 2, 5, 10 … in digits, not in powers of ten."""
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _look(each: Measured) -> dict[str, Any]:
    several = {"linestyle": ":"} if each.instances > 1 else {}
    if each.is_ours:
        return {"color": figures.OURS, "linewidth": 2.6, "zorder": 5, **several}
    if each.is_reference:
        return {"color": INK, "linewidth": 1.2, "linestyle": _REFERENCE_DASHES.get(each.system, "-.")}
    return {"color": _COLOURS.get(each.system, figures.PEER), "linewidth": 1.4, **several}
