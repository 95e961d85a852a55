"""Faults of links: those of gateway 0 and that of r0's agent. Each link leads through a proxy."""

from __future__ import annotations

import asyncio

from bench.faults.fault import LASTS_S, Component, Fault, Inflict
from bench.faults.stage import Layout, Stage

_OF_CLIENTS, _OF_REPLICA = "clients", "replica"
_STORE_SLOW_S, _SLOW_S = 0.03, 0.3
"""A placement waits less than 30 ms for Redis."""
_LINKS = {
    "client": (_OF_CLIENTS, "clients and a gateway", 5.0, _SLOW_S),
    "gateway-redis": ("gateway-store", "a gateway and Redis", 2.0, _STORE_SLOW_S),
    "gateway-replica": (_OF_REPLICA, "a gateway and a replica", 5.0, _SLOW_S),
    "agent-redis": ("agent-store", "an agent and Redis", 5.0, _SLOW_S),
}
"""By name: the stage's name for the link, its two ends, the seconds within which all must be right again, and the
delay."""


def _hold(stage: Stage, link: str) -> None:
    """Clients of gateway 0 lose their link to it. Gateway 0 loses r0's running answers if its link to r0 is struck."""
    if link == _OF_CLIENTS:
        stage.strike(LASTS_S, gateways=(0,))
    elif link == _OF_REPLICA:
        stage.strike(LASTS_S, replicas=("r0",))


def _of(link: str, between: str, right_within_s: float, delay_s: float) -> dict[str, Fault]:
    async def cut(stage: Stage) -> None:
        _hold(stage, link)
        stage.proxies[link].cut()
        await asyncio.sleep(LASTS_S)
        await stage.proxies[link].mend()

    async def cut_one_way(stage: Stage) -> None:
        _hold(stage, link)
        stage.proxies[link].answers.hold()
        await asyncio.sleep(LASTS_S)
        await stage.proxies[link].mend()

    async def slow(stage: Stage) -> None:
        stage.proxies[link].slow(delay_s)
        await asyncio.sleep(LASTS_S)
        await stage.proxies[link].mend()

    def fault(what: str, inflict: Inflict) -> Fault:
        sentence = f"the link between {between} {what}"
        layout = Layout(proxied=(link,))
        return Fault(Component.LINK, sentence, inflict, layout, right_within_s=right_within_s)

    return {
        "cut": fault(f"is cut for {LASTS_S:g} s: open connections are reset, and there are no new ones", cut),
        "one-way": fault(f"passes bytes one way only for {LASTS_S:g} s: requests arrive, answers do not", cut_one_way),
        "slow": fault(f"takes {delay_s * 1000:g} ms longer, there and back, for {LASTS_S:g} s", slow),
    }


FAULTS = {f"link-{name}-{how}": fault for name, link in _LINKS.items() for how, fault in _of(*link).items()}
