"""A real engine stops under load, like a pod that is replaced: no client loses an answer."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from bench.vllm.replicas import VllmCluster, VllmReplica
from tests.polling import eventually
from tests.vllm.clients import Client, busy_crowd
from tests.vllm.streams import is_ready, streams_up_to_one_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

DRAIN_S = 120


async def test_an_engine_told_to_stop_ends_its_streams_and_what_it_refuses_another_answers(
    gateways: list[Client], cluster: VllmCluster
) -> None:
    leaving = cluster.replicas[0]
    async with draining(leaving) as process:
        await eventually(lambda: is_ready(leaving, gateways), within_s=30)
        async with busy_crowd(gateways, seed=12) as crowd, AsyncExitStack() as stack:
            streams = await streams_up_to_one_of(leaving, stack, gateways)
            process.terminate()
            told = len(crowd.replies)
            assert all([(await stream.rest()).endswith("data: [DONE]\n\n") for stream in streams])
            await eventually(lambda: process.poll() is not None, within_s=DRAIN_S)
            await eventually(lambda: len(crowd.replies) > told + 30, within_s=120)
        assert process.returncode == 0
        assert crowd.failures == []
        assert [reply for _, reply in crowd.replies if reply.error or not reply.text] == []
        print(f"\n{len(crowd.replies)} requests while {leaving.id} was told to stop and left, none of them failed")
    await eventually(lambda: is_ready(leaving, gateways), within_s=30)


@asynccontextmanager
async def draining(replica: VllmReplica) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Restarts the replica with time to finish its running requests on SIGTERM. Restores it afterwards."""
    await asyncio.to_thread(replica.kill)
    process = start_alone(replica)
    try:
        await asyncio.to_thread(replica.wait_until_healthy)
        yield process
    finally:
        await replica.restart()


def start_alone(replica: VllmReplica) -> subprocess.Popen[bytes]:
    """Starts the engine without the tests' wrapper processes, so that signals reach it as in a container."""
    command = [*replica.command(), "--shutdown-timeout", str(DRAIN_S)]
    with replica.log.open("ab") as log:
        replica.process = subprocess.Popen(
            command, stdout=log, stderr=log, env=replica.environment(), start_new_session=True
        )
    return replica.process
