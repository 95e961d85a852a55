"""Every fault, by name."""

from __future__ import annotations

from bench.faults import garbage, links, processes, store
from bench.faults.fault import LASTS_S, Component, Fault, nothing

FAULTS: dict[str, Fault] = {
    "nothing": Fault(Component.NONE, f"no fault at all, for {LASTS_S:g} s: what the load alone gives", nothing),
    **processes.of(Component.GATEWAY, lambda stage: stage.gateways[0]),
    **processes.of(Component.REPLICA, lambda stage: stage.replicas["r0"]),
    "replica-hangs": processes.HANG,
    "replica-fails": processes.FAILS,
    **processes.of(Component.AGENT, lambda stage: stage.agents["r0"]),
    **store.FAULTS,
    **garbage.FAULTS,
    **links.FAULTS,
    "rolling-restart": processes.ROLL,
}


def measured_with(gateways: int, waits: bool = False) -> list[str]:
    """The faults that are worth measuring with this number of gateways, and with waiting requests or without them."""
    return [
        name
        for name, fault in FAULTS.items()
        if (gateways == 2 or fault.component.is_of_many_gateways) and (waits or not fault.is_of_the_queue)
    ]
