"""A replica that sleeps, or is paused, gets no requests. Those that waited there are answered by others."""

from __future__ import annotations

import asyncio
from typing import Any

from bench.cluster import SimReplica
from tests.chaos.stage import Stage
from tests.chaos.test_dead_hosts import PATIENT, are, held_by
from tests.cluster.clients import ask, is_complete
from tests.cluster.gateways import another_gateway
from tests.polling import Patience, eventually

READY = {"r0": "ready", "r1": "ready", "r2": "ready"}


async def order(stage: Stage, replica: SimReplica, what: str, **query: str) -> None:
    (await stage.http.post(f"{replica.url}{what}", params=query)).raise_for_status()


async def test_what_waits_for_a_replica_that_falls_asleep_is_answered_by_others(stage: Stage) -> None:
    """Its clients would wait until it is awake, because it takes requests and answers none of them."""
    r0, url = stage.replica("r0"), stage.urls[0]
    async with another_gateway(stage.cluster, "patient", **PATIENT) as gateway:
        moved, patience = 0.0, Patience(30)
        while not moved:  # its agent may tell of the sleep before the requests come: then none waits there
            assert not patience.is_over()
            await is_awake(stage, r0)
            texts = await held_by(stage, r0)
            await order(stage, r0, "/sleep")
            asked = (ask(stage.http, gateway.url, text, stream=n % 2 == 1) for n, text in enumerate(texts))
            answers = await asyncio.gather(*asked)
            assert all(is_complete(each) and each.headers["x-kvgate-replica"] != "r0" for each in answers)
            moved = await stage.metric(gateway.url, "kvgate_retries_total", reason="asleep")
    assert await are(stage, READY | {"r0": "asleep"})
    await eventually(lambda: shows_asleep(stage, url, ["r0"]))
    assert (await stage.ready(url))["status"] == 200
    assert await stage.metric(url, "kvgate_replica_asleep", replica="r0") == 1
    assert await stage.ledger.breakers() == {}
    await is_awake(stage, r0)
    await stage.warm_prompt(on="r0")


async def is_awake(stage: Stage, replica: SimReplica) -> None:
    """Wakes a replica, and waits until all know it."""
    await order(stage, replica, "/wake_up", tags="weights")
    await order(stage, replica, "/wake_up", tags="kv_cache")
    await eventually(lambda: are(stage, READY))


async def shows_asleep(stage: Stage, url: str, replicas: list[str]) -> bool:
    found: list[str] = (await stage.ready(url)).get("asleep", [])
    return found == replicas


async def test_if_all_sleep_requests_are_told_so_those_that_waited_already_too(stage: Stage) -> None:
    url = stage.urls[0]
    async with another_gateway(stage.cluster, "patient", **PATIENT) as gateway:
        for replica in stage.cluster.replicas:
            await order(stage, replica, "/sleep", level="0", mode="keep")
        early = await asyncio.gather(*(ask(stage.http, gateway.url, stage.new_prompt()) for _ in range(6)))
        await eventually(lambda: shows_asleep(stage, gateway.url, ["r0", "r1", "r2"]))
        told = [await ask(stage.http, gateway.url, stage.new_prompt())]
    await eventually(lambda: shows_asleep(stage, url, ["r0", "r1", "r2"]))
    assert (await stage.ready(url))["status"] == 503
    told.append(await ask(stage.http, url, stage.new_prompt()))
    errors: list[dict[str, Any]] = [answer.json()["error"] for answer in (*early, *told)]
    assert {(answer.status_code, error["code"]) for answer, error in zip((*early, *told), errors, strict=True)} == {
        (503, "no_replica")
    }
    # The store may know of the last one's sleep before the gateway does: then it does not say why.
    assert all("replicas of this model are asleep" in error["message"] for error in errors[-len(told) :])
    for replica in stage.cluster.replicas:
        await order(stage, replica, "/wake_up")
    await eventually(lambda: are(stage, READY))
    await eventually(lambda: shows_asleep(stage, url, []))
    assert is_complete(await ask(stage.http, url, stage.new_prompt()))


async def test_a_paused_replica_is_not_broken(stage: Stage) -> None:
    """It refuses requests with a 503."""
    r0, url = stage.replica("r0"), stage.urls[0]
    texts = await held_by(stage, r0)
    await order(stage, r0, "/pause")
    answers = [await ask(stage.http, url, text, stream=n % 2 == 1) for n, text in enumerate(texts)]
    assert all(is_complete(each) and each.headers["x-kvgate-replica"] != "r0" for each in answers)
    await eventually(lambda: are(stage, READY | {"r0": "asleep"}))
    assert await stage.ledger.breakers() == {}
    await order(stage, r0, "/resume")
    await eventually(lambda: are(stage, READY))
