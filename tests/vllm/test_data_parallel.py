"""A data-parallel deployment of real vLLM: two servers ("nodes") with two ranks each (`--data-parallel-hybrid-lb`), one
behind the front end in Python and one behind that in Rust. They read X-data-parallel-rank differently."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from bench.cluster import Cluster, running_gateways
from bench.vllm.replicas import BLOCK_TOKENS, VllmReplica, start_together
from gateway.ops.local.ports import free_ports
from tests.polling import eventually
from tests.vllm.clients import Client
from tests.vllm.conftest import CONFIG
from tests.vllm.workload import Messages, text

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

_RANKS, _LOCAL = 4, 2
_PORTS = 1 + 2 * _RANKS
"""Of a node: HTTP, and those of events and replays, to which vLLM adds the rank."""


def node(first_rank: int, has_rust_frontend: bool, rpc_port: int, ports: list[int], folder: Path) -> VllmReplica:
    options = {
        "size": _RANKS,
        "size-local": _LOCAL,
        "start-rank": first_rank,
        "address": "127.0.0.1",
        "rpc-port": rpc_port,
    }
    name, (port, events) = f"node{first_rank}", ports[:2]
    more = [part for option, value in options.items() for part in (f"--data-parallel-{option}", str(value))]
    return VllmReplica(
        name,
        port,
        folder / f"{name}.log",
        events,
        events + _RANKS,
        blocks=256,
        has_rust_frontend=has_rust_frontend,
        more=("--data-parallel-hybrid-lb", *more),
    )


@pytest.fixture(params=[False, True], ids=["the second node in python", "the second node in rust"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    rpc_port, *ports = free_ports(1 + 2 * _PORTS)
    with tempfile.TemporaryDirectory(prefix="kvgate-ranks-") as folder, ExitStack() as stack:
        nodes = [
            node(0, not request.param, rpc_port, ports[:_PORTS], Path(folder)),
            node(_LOCAL, request.param, rpc_port, ports[_PORTS:], Path(folder)),
        ]
        for each in nodes:
            stack.callback(each.kill)
        print(f"\n{_RANKS} ranks serve after {start_together(nodes):.0f} s", flush=True)
        urls = {f"r{rank}": nodes[rank // _LOCAL].url for rank in range(_RANKS)}
        beside = {f"r{rank}": f"dp_rank={rank}" for rank in range(_RANKS)}
        yield stack.enter_context(running_gateways(urls, gateways=2, config=CONFIG, beside=beside))


async def test_each_rank_computes_what_is_placed_there_and_its_events_are_in_the_map(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    gateways, ranks = [Client(http, url) for url in cluster.gateway_urls], {f"r{rank}" for rank in range(_RANKS)}

    async def all_are_exact() -> bool:
        return set((await http.get(gateways[0].url + "/ready")).json()["exact"]) == ranks

    await eventually(all_are_exact, within_s=30)
    prompts: list[Messages] = [[{"role": "user", "content": text(f"prompt {n}", 1000)}] for n in range(2 * _RANKS)]
    served = [await gateways[n % 2].ask(prompt, policy="round_robin") for n, prompt in enumerate(prompts)]
    assert {reply.replica for reply in served} == ranks
    for n, (prompt, first) in enumerate(zip(prompts, served, strict=True)):
        await gateways[1 - n % 2].until_found(prompt, first)
        again = await gateways[1 - n % 2].ask(prompt, stream=True)
        assert (again.replica, again.state, again.is_as_predicted) == (first.replica, "exact", True)
        assert again.cached_tokens > again.prompt_tokens - 2 * BLOCK_TOKENS
