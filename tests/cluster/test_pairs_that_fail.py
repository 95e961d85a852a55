"""Pairs whose replicas do not speak the gateways' protocol: requests are served, and the doctor says what is wrong."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import httpx
import pytest

from bench.cluster import running_gateways, running_replicas
from gateway.doctor import gather as gathering
from gateway.doctor.examine import examine
from gateway.doctor.gather import Targets, gather
from gateway.settings.gateway_settings import ReplicaSettings
from tests.cluster.clients import CHAT, chat, prose
from tests.polling import wait_until

CONFIG = {"redis": {"budget_ms": 5000}, "pairs": {"min_tokens": 100}}
ROLES = {"r0": "role=prefill", "r1": "role=decode", "r2": "role=decode"}


async def test_the_doctor_finds_replicas_without_the_connector_that_gateways_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "_BETWEEN_SNAPSHOTS_S", 0.0)
    with (
        tempfile.TemporaryDirectory(prefix="kvgate-") as folder,
        running_replicas(Path(folder), len(ROLES), ("--speed", "0")) as sims,
        running_gateways({sim.id: sim.url for sim in sims}, config=CONFIG, beside=ROLES) as it,
    ):
        for url in it.gateway_urls:
            wait_until(lambda url=url: len(httpx.get(f"{url}/ready").json()["replicas"]) == len(ROLES))
        async with httpx.AsyncClient(timeout=60) as http:
            for number in range(12):
                url = it.gateway_urls[number % 2]
                assert (await http.post(url + CHAT, json=chat(prose(f"in vain {number}")))).status_code == 200
        replicas = tuple(ReplicaSettings(id=sim.id, url=sim.url) for sim in sims)
        said = examine(await gather(Targets(it.redis_url, gateways=tuple(it.gateway_urls), replicas=replicas)))
    found = {(each.code, each.subject): each.what for each in said.findings if each.code.startswith("pairs-")}
    assert set(found) == {
        ("pairs-fail", "replica r0"),
        *(("pairs-other-connector", f"replica {name}") for name in ROLES),
    }
    assert re.fullmatch(r"(\d+) of the last \1 prompts .*: no_reference \1", found["pairs-fail", "replica r0"])
