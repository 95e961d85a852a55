"""The plan that `kvgate up` makes from its options, and its gateways' configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gateway.ops.errors import CommandError
from gateway.ops.followed import FollowedReplica
from gateway.ops.local.plan import (
    Plan,
    agent_environment,
    base_config,
    gateway_config,
    not_used,
    parse_fronted,
)
from gateway.settings.config_file import merged
from gateway.settings.gateway_settings import build_settings

REPLICAS = [FollowedReplica(id="r0", url="http://127.0.0.1:8000")]


def settings_of(plan: Plan, base: dict[str, object] | None = None):  # type: ignore[no-untyped-def]
    text, settings = gateway_config(plan, base or {}, "gw0", 9000, "redis://127.0.0.1:7000", REPLICAS, {})
    assert build_settings(merged(dict(base or {}), yaml.safe_load(text)), {}) == settings
    return settings


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("h:1", "is not understood; write URL, or id=r0,url=http://host:port"),
        ("id=r0", "url: is missing"),
        ("id=,url=http://h:1", "id: is ''; must be 1 to 48 of"),
        ("http://h:1/v1", "url: leave /v1 out"),
        ("http://h:1,events", "is not understood"),
        ("http://h:1,url=http://h:2", "is not understood"),
        ("id=r0,url=http://h:1,id=r1", "is not understood"),
        ("id=r0,url=http://h:1,event=tcp://h:1", "event: is not a known key; did you mean events?"),
        ("id=r0,url=http://h:1,events=http://h:1", "events: is 'http://h:1'; must be tcp://host:port"),
        ("id=r0,url=http://h:1,events=ipc:///", "must be tcp://host:port, or ipc:///path of a socket"),
        ("id=r0,url=http://h:1,events=tcp://h:1,replay=tcp://h", "replay: is 'tcp://h'; must be tcp://host:port"),
        ("id=r0,url=http://h:1,events=tcp://h:1,replay=tcp://h:x", "replay: is 'tcp://h:x'; must be tcp://host:port"),
        ("id=r0,url=http://h:1,replay=tcp://h:5558", "replay: needs events"),
        ("id=r0,url=http://h:1,lmcache=h:8080", "lmcache: is 'h:8080'; must be its HTTP server's base"),
        ("id=r0,url=http://h:1,dp_rank=-1", "dp_rank: must be the replica's rank"),
    ],
)
def test_a_replica_that_is_not_understood_says_what_is_wrong(text: str, wrong: str) -> None:
    with pytest.raises(CommandError) as caught:
        parse_fronted(text, 0)
    assert wrong in str(caught.value)


def test_a_replica_without_an_id_is_named_by_its_position() -> None:
    assert parse_fronted("http://h:1/", 1) == FollowedReplica(id="r1", url="http://h:1")
    events = "tcp://h:5557"
    assert parse_fronted(f"http://h:1,events={events}", 0) == FollowedReplica(id="r0", url="http://h:1", events=events)
    whole = parse_fronted("id=a,url=http://h:1,dp_rank=2,lmcache=http://h:5580/", 0)
    assert whole == FollowedReplica(id="a", url="http://h:1", dp_rank=2, lmcache="http://h:5580")


def of_agents(base: dict[str, object], env: dict[str, str]) -> dict[str, str]:
    return agent_environment(build_settings(base, env))


def test_agents_show_the_certificate_that_gateways_show_to_replicas() -> None:
    base: dict[str, object] = {"replica_tls": {"certificate": "base.crt", "key": "base.key"}}
    names = ("KVGATE_REPLICA_TLS_CERTIFICATE", "KVGATE_REPLICA_TLS_KEY")
    assert [of_agents(base, {})[name] for name in names] == ["base.crt", "base.key"]
    env = {"KVGATE_REPLICA_TLS_CERTIFICATE": "own.crt"}
    assert [of_agents(base, env)[name] for name in names] == ["own.crt", "base.key"]
    both = dict(zip(names, ("own.crt", "own.key"), strict=True))
    assert both.items() <= of_agents({}, both).items()
    assert not set(names) & of_agents({}, {}).keys()


def test_a_gateway_gets_its_own_port_and_the_shared_one(tmp_path: Path) -> None:
    settings = settings_of(Plan(tmp_path, port=8080))
    assert (settings.id, settings.host, settings.port, settings.shared_port) == ("gw0", "127.0.0.1", 9000, 8080)
    assert settings.redis.url == "redis://127.0.0.1:7000"
    assert [replica.id for replica in settings.replicas] == ["r0"]


def test_what_the_base_says_in_vain_is_named_with_the_option_that_says_it(tmp_path: Path) -> None:
    base = {"port": 9099, "replicas": [{"id": "a", "url": "http://h:1"}], "redis": {"url": "redis://other"}}
    assert not_used(Plan(tmp_path), base) == ["replicas (--replica)", "port (--port)", "redis.url (--redis-url)"]
    given = Plan(tmp_path, port=9098, fronted=(REPLICAS[0],), redis_url="redis://h")
    assert not_used(given, base) == ["replicas (--replica)"]
    assert not_used(given, base | {"replicas": [{"id": "a", "url": REPLICAS[0].url}]}) == []
    assert not_used(Plan(tmp_path), {"redis": {"budget_ms": 50}, "replicas": []}) == []


def test_a_bad_base_is_named_with_each_of_its_problems_on_a_line(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("port: 0\nprot: 1\n")
    with pytest.raises(CommandError) as caught:
        base_config(Plan(tmp_path, base_config=base), {})
    assert str(caught.value).splitlines() == [
        f"{base}: 2 problems",
        "  port: is 0; must be at least 1",
        "  prot: is not a known key; did you mean port?",
    ]


@pytest.mark.parametrize(
    ("env", "key"), [({}, "of the file"), ({"KVGATE_REPLICA_API_KEY": "of the environment"}, "of the environment")]
)
def test_an_agent_gets_the_key_that_the_gateways_send_to_replicas_and_their_redis(
    env: dict[str, str], key: str
) -> None:
    redis = {"url": "redis://:password@h", "namespace": "a"}
    assert of_agents({"security": {"replica_api_key": "of the file"}, "redis": redis}, env) == {
        "KVGATE_REDIS_URL": "redis://:password@h",
        "KVGATE_REDIS_NAMESPACE": "a",
        "KVGATE_REPLICA_API_KEY": key,
    }
