"""Replicas from DNS, with a real DNS server for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.replicas.discovery.discovery import Discovery
from gateway.replicas.discovery.dns import DnsName
from gateway.replicas.discovery.source import SourceDown
from gateway.settings.discovery_settings import DnsSettings
from tests.gateway.replicas.discovery.dns_server import DnsServer, running_dns


@pytest.fixture
async def dns() -> AsyncIterator[DnsServer]:
    async with running_dns() as server:
        yield server


async def look(server: DnsServer, name: str = "vllm.test", **settings: Any) -> dict[str, str]:
    """The replicas of the first answer: id → URL."""
    source = DnsName(name, DnsSettings(names=[name], server=server.address, **settings))
    return {replica.id: replica.url for replica in await anext(source.follow())}


async def test_each_address_of_a_name_is_a_replica_named_after_it(dns: DnsServer) -> None:
    dns.records["vllm.test."] = ["A 10.0.0.2", "A 10.0.0.1"]
    assert await look(dns) == {"10.0.0.2-8000": "http://10.0.0.2:8000", "10.0.0.1-8000": "http://10.0.0.1:8000"}
    assert await look(dns, port=443, scheme="https") == {
        "10.0.0.2-443": "https://10.0.0.2:443",
        "10.0.0.1-443": "https://10.0.0.1:443",
    }


async def test_every_replica_that_a_name_finds_has_the_names_labels(dns: DnsServer) -> None:
    dns.records["vllm.test."] = ["A 10.0.0.2", "A 10.0.0.1"]
    settings = DnsSettings(names=["vllm.test"], server=dns.address, labels={"version": "v2"})
    found = await anext(DnsName("vllm.test", settings).follow())
    assert [replica.labels for replica in found] == [{"version": "v2"}] * 2


async def test_a_replica_with_addresses_of_both_kinds_is_one(dns: DnsServer) -> None:
    dns.records["vllm.test."] = ["A 10.0.0.1", "AAAA 2001:db8::1"]
    assert await look(dns) == {"10.0.0.1-8000": "http://10.0.0.1:8000"}


async def test_a_name_with_ipv6_addresses_alone_is_followed_too(dns: DnsServer) -> None:
    dns.records["vllm.test."] = ["AAAA 2001:db8::1"]
    assert await look(dns) == {"2001-db8--1-8000": "http://[2001:db8::1]:8000"}


async def test_srv_records_say_the_port_of_each(dns: DnsServer) -> None:
    dns.records["_http._tcp.vllm.test."] = ["SRV 0 50 8001 a.vllm.test.", "SRV 0 50 8002 b.vllm.test."]
    dns.records["a.vllm.test."] = dns.records["b.vllm.test."] = ["A 10.0.0.1"]
    assert await look(dns, "_http._tcp.vllm.test") == {
        "10.0.0.1-8001": "http://10.0.0.1:8001",
        "10.0.0.1-8002": "http://10.0.0.1:8002",
    }


async def test_an_srv_record_that_leads_nowhere_hides_no_other(dns: DnsServer) -> None:
    dns.records["_http._tcp.vllm.test."] = ["SRV 0 50 8001 gone.vllm.test.", "SRV 0 50 8002 b.vllm.test."]
    dns.records["b.vllm.test."] = ["A 10.0.0.1"]
    assert await look(dns, "_http._tcp.vllm.test") == {"10.0.0.1-8002": "http://10.0.0.1:8002"}


async def test_an_answer_too_long_for_udp_is_asked_for_over_tcp(dns: DnsServer) -> None:
    dns.records["vllm.test."] = [f"A 10.0.0.{n}" for n in range(1, 101)]
    assert len(await look(dns)) == 100
    assert dns.asked_over_tcp == 1


@pytest.mark.parametrize("name", ["vllm.test", "_http._tcp.vllm.test"])
async def test_a_name_without_addresses_has_no_replicas(dns: DnsServer, name: str) -> None:
    dns.records[f"{name}."] = ["TXT nothing"]
    assert await look(dns, name) == {}


@pytest.mark.parametrize("name", ["vllm.test", "_http._tcp.vllm.test"])
async def test_of_a_name_that_does_not_exist_nothing_is_known(dns: DnsServer, name: str) -> None:
    with pytest.raises(SourceDown, match="does not exist"):
        await look(dns, name)


@pytest.mark.parametrize("fault", ["silent", "servfail"])
async def test_of_a_server_that_does_not_answer_nothing_is_known(dns: DnsServer, fault: str) -> None:
    dns.records["vllm.test."] = ["A 10.0.0.1"]
    dns.fault = fault
    with pytest.raises(SourceDown, match=r"vllm\.test|127\.0\.0\.1"):
        await look(dns)


async def test_a_name_is_asked_for_again_after_each_interval(dns: DnsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.replicas.discovery.dns.INTERVAL_S", 0.05)
    dns.records["vllm.test."] = ["A 10.0.0.1"]
    answers = DnsName("vllm.test", DnsSettings(names=["vllm.test"], server=dns.address)).follow()
    assert len(await anext(answers)) == 1
    dns.records["vllm.test."] = ["A 10.0.0.1", "A 10.0.0.2"]
    assert len(await anext(answers)) == 2
    await answers.aclose()


@pytest.mark.parametrize("turns", range(8))
async def test_who_is_told_to_stop_while_an_answer_comes_in_stops(
    dns: DnsServer, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Python 3.12, a wait with a time limit loses a cancellation that arrives together with the answer."""
    monkeypatch.setattr("gateway.replicas.discovery.dns.INTERVAL_S", 0.05)
    dns.records["vllm.test."] = ["A 10.0.0.1"]
    loop = asyncio.get_running_loop()
    source = DnsName("vllm.test", DnsSettings(names=["vllm.test"], server=dns.address))
    following = loop.create_task(Discovery([], [source], lambda _: None).run())

    def cancel_after(turns: int) -> None:
        if turns:
            loop.call_soon(cancel_after, turns - 1)
        else:
            following.cancel()

    def cancel_once() -> None:
        dns.on_answer = lambda: None
        cancel_after(turns)

    dns.on_answer = cancel_once
    done, _ = await asyncio.wait([following], timeout=5)
    assert following in done
