"""Samples problems, and finds when all is right again. Every gateway must decide exactly on every replica. Requests
must be placed exactly. The store's load must match the clients' requests. No lease or breaker may end later than a new
one would."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bench import ledger
from bench.faults.load import Load
from bench.faults.queue import requests_waiting
from bench.faults.stage import Stage
from bench.faults.stepped_clock import OFFSET_KEY
from bench.faults.verdicts import Seen
from coordinator.errors import StoreError

_LOOKS_PER_S = 16.0
"""Over all gateways."""
_LEDGER_S = 0.25
_OFF, _OFF_SHARE = 5, 0.25
"""The store may differ from the clients by this many requests, or by this share of them if that is more."""
LONGEST_LIFE_MS = 10_000
"""No lease lasts this long, and no breaker stays open this long."""
STEADY_S = 5.0
"""After this long without a problem, all is right."""
_TOLERATED_SHARE = 0.1
"""A share of the requests of a second. On a busy machine, a request sometimes waits for Redis beyond its limit."""
_TOLERATED = 2


@dataclass(frozen=True, slots=True)
class Wrong:
    """A problem, with the time at which it was seen."""

    at_s: float
    what: str


def placed_wrong(seen: Iterable[Seen]) -> list[Wrong]:
    """Seconds in which too many requests were placed without the map, or not exactly. Each is given by its last such
    request."""
    by_second: defaultdict[int, list[Seen]] = defaultdict(list)
    for one in seen:
        if one.state:
            by_second[int(one.sent_s)].append(one)
    found = []
    for several in by_second.values():
        otherwise = [one for one in several if one.state != "exact"]
        if len(otherwise) > max(_TOLERATED, _TOLERATED_SHARE * len(several)):
            last = max(otherwise, key=lambda one: one.sent_s)
            found.append(Wrong(last.sent_s, f"{len(otherwise)} of {len(several)} requests placed as {last.state}"))
    return found


def right_after_s(wrong: Iterable[Wrong], since_s: float, until_s: float) -> float | None:
    """Seconds from `since_s` to the last problem before all was right for STEADY_S. None if all was never right. Later
    problems of a busy machine do not count."""
    last_s = since_s
    for at_s in [*sorted(each.at_s for each in wrong if each.at_s >= since_s), until_s]:
        if at_s - last_s >= STEADY_S:
            return last_s - since_s
        last_s = at_s
    return None


@dataclass
class ProblemSampler:
    """Collects the problems of the cluster while `run` runs."""

    stage: Stage
    load: Load
    wrong: list[Wrong] = field(default_factory=list)
    _is_off: bool = False
    """Whether the load differed from the clients' in the last sample."""

    async def run(self) -> None:
        """Collects problems until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for gateway in range(len(self.stage.gateways)):
                group.create_task(self._sample_gateway(gateway))
            group.create_task(self._sample_load())

    def _note(self, what: str) -> None:
        if what:
            self.wrong.append(Wrong(self.stage.now_s(), what))

    async def _sample_gateway(self, gateway: int) -> None:
        while True:
            self._note(await self.stage.not_exact(gateway))
            await asyncio.sleep(len(self.stage.gateways) / _LOOKS_PER_S)

    async def _sample_load(self) -> None:
        while True:
            self._note(await self._load_problem())
            await asyncio.sleep(_LEDGER_S)

    async def _load_problem(self) -> str:
        """The store counts a request from slightly after it is sent until slightly after its answer. So a difference
        counts only if two samples in a row have it."""
        try:
            sums, written_ahead = await look_at_sums(self.stage), await _written_ahead(self.stage)
            waiting = await requests_waiting(self.stage)
        except (StoreError, ValueError) as error:
            return f"load cannot be read: {error}"
        in_flight, was_off, self._is_off = self.load.in_flight, self._is_off, False
        known = sums.total + waiting
        if abs(known - in_flight) > max(_OFF, _OFF_SHARE * in_flight):
            self._is_off = True
        off = [f"load of {known} requests, of {in_flight}"] if self._is_off and was_off else []
        return "; ".join([*sums.problems(), *off, *written_ahead])

    async def until_right(self, within_s: float) -> bool:
        """Whether all was right for STEADY_S within this time. The answer says how its request was placed, so running
        requests are waited for as well."""
        began_s = last_s = self.stage.now_s()
        while self.stage.now_s() - last_s < STEADY_S + self.load.answered_within_s:
            if self.stage.now_s() - began_s > within_s:
                return False
            await asyncio.sleep(0.25)
            wrong = [*self.wrong, *placed_wrong(self.load.seen)]
            last_s = max((each.at_s for each in wrong), default=began_s)
            last_s = max(last_s, began_s)
        return True


# Leases and breakers that end too far ahead of Redis' clock, as KVGate's scripts read it.
_ENDS = """
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + (tonumber(redis.call('GET', ARGV[1])) or 0)
local ahead = {}
local function look(key, fields, pattern)
  local all = redis.call('TYPE', key)['ok'] == 'hash' and redis.call('HGETALL', key) or {}
  for i = 1, #all, 2 do
    local ends_ms = string.find(all[i], fields) and tonumber(string.match(all[i + 1], pattern) or '')
    if ends_ms and ends_ms > now_ms + tonumber(ARGV[6]) then
      ahead[#ahead + 1] = { all[i], tostring(math.floor((ends_ms - now_ms) / 1000)) }
    end
  end
end
look(ARGV[2], '', '^%d+ (%d+)') -- gateways
look(ARGV[3], '', '^%d+ (%d+)') -- breakers
look(ARGV[4], '', '^%S+ %S+ (%d+)') -- agents
look(ARGV[5], '^worker$', ' (%d+)$') -- leases
look(ARGV[5], '^events:', ' (%d+)$')
return ahead
"""


async def _written_ahead(stage: Stage) -> list[str]:
    """Leases and breakers that end later than any new one could. Raises StoreError."""
    keys = stage.keys
    ends = (keys.gateways, keys.breakers, keys.agents, keys.leases)
    ahead = await stage.line.ask("EVAL", _ENDS, 0, OFFSET_KEY, *ends, LONGEST_LIFE_MS)
    return [f"{name} ends in {seconds} s" for name, seconds in as_text(ahead)]


async def look_at_sums(stage: Stage) -> ledger.Sums:
    """Raises StoreError, and ValueError if the reply cannot be read."""
    return ledger.sums(as_text(await stage.line.ask("EVAL", *ledger.ask_sums(stage.keys))))


def as_text(reply: Sequence[Sequence[bytes]]) -> list[list[str]]:
    """Raises ValueError if the reply has another form."""
    return [[each.decode() for each in one] for one in reply]
