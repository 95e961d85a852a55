"""A preStop hook asks the agent beside the engine to drain its replica."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from gateway.ops.local.ports import free_ports
from tests.api.stage import running_agent
from tests.chaos.stage import Stage
from tests.cluster.clients import ask, held_stream
from tests.polling import eventually


async def test_the_agents_port_drains_its_replica_and_answers_when_the_last_request_is_over(
    stage: Stage, tmp_path: Path
) -> None:
    prompt, replica = await stage.warm_prompt(on="r1")
    port = free_ports(1)[0]
    with running_agent(tmp_path, stage.redis.url, replica, "--control-port", str(port)):
        async with httpx.AsyncClient(timeout=30) as kubelet:
            url = f"http://127.0.0.1:{port}/drain"
            await eventually(lambda: follows(stage))
            await eventually(lambda: refuses(kubelet, url))  # as a web page would send it
            kubelet.headers["x-kvgate-drain"] = "1"
            async with held_stream(stage.http, stage.urls[0], prompt) as stream:
                hook = asyncio.get_running_loop().create_task(kubelet.get(url))
                await eventually(lambda: is_out(stage))
                assert (await ask(stage.http, stage.urls[1], prompt)).headers["x-kvgate-replica"] != "r1"
                assert await stream.goes_on()
                assert not hook.done()
            assert (await hook).text == "drained\n"
            stage.redis.kill()
            assert (await kubelet.get(url)).status_code == 503
            stage.redis.start()
    replica.kill()  # a new life, which is not drained
    replica.start()


async def refuses(kubelet: httpx.AsyncClient, url: str) -> bool:
    try:
        answer = await kubelet.get(url)
    except httpx.ConnectError:
        return False  # it does not listen yet
    assert (answer.status_code, "x-kvgate-drain" in answer.text) == (400, True)
    return True


async def follows(stage: Stage) -> bool:
    return "r1" in await stage.ledger.agents()


async def is_out(stage: Stage) -> bool:
    return all(["r1" not in (await stage.ready(url))["replicas"] for url in stage.urls])
