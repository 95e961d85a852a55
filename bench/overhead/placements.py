"""How long placements take, as gateways and pickers count it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import isfinite

import httpx

_BUCKET = re.compile(r'^kvgate_placement_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)


def placements(urls: Iterable[str]) -> Counter[float]:
    """By the upper bound of each bucket in seconds: how many placements took at most as long. Of all URLs together."""
    found = Counter[float]()
    for url in urls:
        for bound, count in _BUCKET.findall(httpx.get(f"{url}/metrics", timeout=10).raise_for_status().text):
            found[float(bound)] += int(float(count))
    return found


def percentile_ms(before: Mapping[float, int], after: Mapping[float, int], share: float) -> float:
    """The time below which this share of the placements between two looks lies. Within a bucket, placements are taken
    as evenly spread, as Prometheus does it. 0 without placements."""
    counts = [(bound, after[bound] - before.get(bound, 0)) for bound in sorted(after)]
    wanted = share * counts[-1][1] if counts else 0.0
    for (low_s, below), (high_s, upto) in pairwise([(0.0, 0), *counts]):
        if wanted and upto >= wanted:
            width_s = high_s - low_s if isfinite(high_s) else 0.0
            return round((low_s + width_s * (wanted - below) / (upto - below)) * 1000, 3)
    return 0.0
