"""Faults of the cluster's own processes: of gateway 0, replica r0 and its agent.

A process that gets SIGTERM may finish its requests, so this excuses no failure. A slow process excuses none either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bench.faults.fault import LASTS_S, LATE_AFTER_S, PLAIN, RESTARTS_AFTER_S, Component, Fault
from bench.faults.program import RUNNING_S, STOPPED_S, Program
from bench.faults.stage import Layout, Stage

HANGS_S = 20.0
HANG_LATE_AFTER_S = 10.0 + LATE_AFTER_S
"""After 10 s without progress, a replica counts as hanging. Until then it may be computing a long prompt."""
_AT_ONCE_S = 0.5
"""A kill strikes the requests that are there, and those that arrive until nobody listens on the port any more."""
_REPLICA_RESTARTS_AFTER_S = 5.0
"""An engine takes longer to start than any other process."""
Pick = Callable[[Stage], Program]
_SLOW = f"stands still for {STOPPED_S * 1000:g} ms of every {(STOPPED_S + RUNNING_S) * 1000:g} ms, for {LASTS_S:g} s"


def _hold(stage: Stage, component: Component, for_s: float) -> None:
    if component is Component.GATEWAY:
        stage.strike(for_s, gateways=(0,))
    elif component is Component.REPLICA:
        stage.strike(for_s, replicas=("r0",))


def of(component: Component, pick: Pick, layout: Layout = PLAIN) -> dict[str, Fault]:
    """The four faults that every process can have."""

    async def kill(stage: Stage) -> None:
        _hold(stage, component, _AT_ONCE_S)
        await pick(stage).kill()
        await _again(stage, component, pick(stage))

    async def stop(stage: Stage) -> None:
        await pick(stage).stop()
        await _again(stage, component, pick(stage))

    async def freeze(stage: Stage) -> None:
        _hold(stage, component, LASTS_S + _AT_ONCE_S)
        pick(stage).freeze()
        await asyncio.sleep(LASTS_S)
        pick(stage).thaw()

    async def slow(stage: Stage) -> None:
        await pick(stage).slow(LASTS_S)

    name = component.value
    one = f"an {name}" if name.startswith("a") else f"a {name}"
    is_replica = component is Component.REPLICA
    after = f"started again {_REPLICA_RESTARTS_AFTER_S if is_replica else RESTARTS_AFTER_S:g} s later"
    return {
        f"{name}-killed": Fault(
            component, f"{one} is killed, and {after}", kill, layout, counts_from_strike=not is_replica
        ),
        f"{name}-stopped": Fault(component, f"{one} is told to stop (SIGTERM), and {after}", stop, layout),
        f"{name}-frozen": Fault(
            component,
            f"{one} is frozen (SIGSTOP) for {LASTS_S:g} s",
            freeze,
            layout,
            loses_load=component is Component.GATEWAY,  # it counts as dead meanwhile
        ),
        f"{name}-slow": Fault(component, f"{one} {_SLOW}", slow, layout),
    }


async def _again(stage: Stage, component: Component, program: Program) -> None:
    """Waits until a replica answers. The time until other processes are back is part of KVGate's result, so they are
    not waited for."""
    is_replica = component is Component.REPLICA
    await asyncio.sleep(_REPLICA_RESTARTS_AFTER_S if is_replica else RESTARTS_AFTER_S)
    program.start()
    if is_replica:
        await stage.until(lambda: stage.replica_answers("r0"), "r0")


async def _hang(stage: Stage) -> None:
    """A process that hangs does not recover by itself. Somebody kills it."""
    stage.strike(HANGS_S + _AT_ONCE_S, replicas=("r0",))
    await stage.fail("r0", "stall")
    await asyncio.sleep(HANGS_S)
    await stage.replicas["r0"].kill()
    stage.replicas["r0"].start()
    await stage.until(lambda: stage.replica_answers("r0"), "r0")


HANG = Fault(
    Component.REPLICA,
    f"a replica's engine stands still while its /health is good; after {HANGS_S:g} s it is killed and started again",
    _hang,
    late_after_s=HANG_LATE_AFTER_S,
)


async def _fail(stage: Stage) -> None:
    """An engine whose process has died answers so, until somebody starts its server again. No request may fail."""
    await stage.fail("r0", "error", count=-1)
    await asyncio.sleep(LASTS_S)
    await stage.fail("r0", "none")


FAILS = Fault(
    Component.REPLICA, f"a replica answers every request with a 500 for {LASTS_S:g} s; its /health stays good", _fail
)


async def _roll(stage: Stage) -> None:
    """Follows docs/how-to/upgrade.md. Redis is left alone."""
    for number, gateway in enumerate(stage.gateways):
        stage.balancer.take_out(number)
        await asyncio.sleep(RESTARTS_AFTER_S)  # by now, clients that were given this gateway have connected
        await gateway.stop()
        gateway.start()
        await stage.until(lambda number=number: stage.gateway_is_ready(number), gateway.name)  # type: ignore[misc]
        stage.balancer.put_in(number)
    for program in stage.agents.values():
        await program.stop()
        program.start()
        await stage.until(lambda: stage.is_exact(0), program.name)
    for name, replica in stage.replicas.items():
        await replica.stop()
        replica.start()
        await stage.until(lambda name=name: stage.replica_answers(name), name)  # type: ignore[misc]
        await stage.until(lambda: stage.is_exact(0), name)


ROLL = Fault(
    Component.ALL,
    "gateways, agents and replicas are stopped and started again, one after the other; a gateway is taken out of the "
    "load balancer first; Redis is left alone",
    _roll,
)
