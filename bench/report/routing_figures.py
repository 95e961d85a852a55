"""The plots of a mix: how TTFT is distributed, and how much of the prompts the engines' caches served."""

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

_COLOURS = {
    "sglang-router": "#e08a00",
    "vllm-router": "#009e73",
    "round_robin": "#cc79a7",
    "least_loaded": "#d55e00",
    "consistent_hash": "#9a7fd1",
    "random": figures.PEER,
}
_REFERENCE_DASHES = {"oracle": ":", "pinned": "--"}
_SIZE = (10, 3.8)


def ttft_distributions(title: str, measured: Sequence[Measured]) -> str:
    """Each system with the most instances it was measured with, its seeds pooled."""
    most: dict[str, Measured] = {}
    for each in measured:
        if each.ttft_ms and each.instances >= most.get(each.system, each).instances:
            most[each.system] = each
    if not most:
        return ""
    told = []
    with style():
        drawn = Figure(figsize=_SIZE)
        axes = drawn.add_subplot()
        for each in most.values():
            times_ms = each.ttft_ms
            axes.ecdf(times_ms, label=each.name, **_look(each))
            told.append(f"{each.name} {times_ms[len(times_ms) // 2]:.0f} ms")
        axes.set(xscale="log", xlabel="time to first token (ms, log scale)", ylabel="share of requests", ylim=(0, 1.01))
        _plain_ticks(axes)
        drawn.legend(loc="outside right center")
        alt = f"{title}: cumulative distribution of time to first token. Medians: {', '.join(told)}."
        caption = (
            "The share of requests whose first token came within a time. Further left is better. All seeds together; "
            "xN: with N gateways, or instances of a peer, the most that were measured."
        )
        return figure(f"ttft {title}", drawn, alt, caption)


def cache_shares(title: str, measured: Sequence[Measured]) -> str:
    """Ours, round robin and what was measured with several numbers of instances; the references as levels."""
    by_system: dict[str, list[Measured]] = {}
    for each in measured:
        by_system.setdefault(each.system, []).append(each)
    shown = {system: points for system, points in by_system.items() if _has_a_line(points)}
    if not shown:
        return ""
    told = []
    with style():
        drawn = Figure(figsize=_SIZE)
        axes = drawn.add_subplot()
        for system, points in shown.items():
            shares = [each.middle(_cache_share) for each in points]
            if points[0].is_reference:
                axes.axhline(shares[0], label=system, **_look(points[0]))
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
        label=points[0].system,
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
    if each.is_ours:
        return {"color": figures.OURS, "linewidth": 2.6, "zorder": 5}
    if each.is_reference:
        return {"color": INK, "linewidth": 1.2, "linestyle": _REFERENCE_DASHES.get(each.system, "-.")}
    return {"color": _COLOURS.get(each.system, figures.PEER), "linewidth": 1.4}
