"""Messages while a cluster starts, and when it does not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from gateway.ops.followed import FollowedReplica

_SAY_AFTER_S = 3.0
_REASONS_AFTER_S = 15.0  # before, processes just need time to start


class WaitReport:
    """Reports from time to time which members are not ready."""

    def __init__(self, started: Sequence[str], say: Callable[[str], None]) -> None:
        self._starting = f"starting {', '.join(started)} …"
        self._say = say
        self._said = ""
        self._say_at_s = _SAY_AFTER_S

    def tell(self, problems: Mapping[str, str], waited_s: float) -> None:
        """`problems` holds the reason for each member that is not ready."""
        if waited_s < self._say_at_s:
            return
        text = self._starting if waited_s < _REASONS_AFTER_S else f"waiting for {_by_reason(problems)}"
        if text != self._said:
            self._say(text)
            self._said, self._say_at_s = text, waited_s + _SAY_AFTER_S


def nobody_there(refusals: Mapping[str, str], waited_s: float) -> str:
    """What to do if every server refuses connections; `refusals` holds the reason for each URL."""
    told = ", ".join(f"{url} ({cause})" for url, cause in refusals.items())
    checks = " and ".join(f"curl {url}/health" for url in refusals)
    return (
        f"no server to front after {waited_s:g} s: {told}; start your servers first (one that still loads its model "
        f"refuses connections, too), and run this again once they answer: {checks}"
    )


def why_not_ready(problems: Mapping[str, str], fronted: Sequence[FollowedReplica]) -> tuple[str, bool]:
    """Each reason once, and whether servers are missing that this cluster does not start."""
    told = _by_reason(problems)
    away = [replica for replica in fronted if f"replica {replica.id}: " in told]
    checks = " and ".join(f"curl {replica.url}/health" for replica in away)
    return told + (f"; check that these servers are up and answer with 200: {checks}" if away else ""), bool(away)


def _by_reason(problems: Mapping[str, str]) -> str:
    """Like `gw0, gw1: why; gw2: another reason`."""
    names = defaultdict(list)
    for name, problem in problems.items():
        names[problem].append(name)
    return "; ".join(f"{', '.join(those)}: {problem}" for problem, those in names.items())
