"""A gateway's configuration: valid settings, and the message for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from gateway.settings.base import Section
from gateway.settings.config_file import SettingsError
from gateway.settings.discovery_settings import DnsSettings, KubernetesSettings
from gateway.settings.gateway_settings import GatewaySettings, build_settings, load_settings
from gateway.settings.policies import DEFAULT_POLICY, POLICIES

ROOT = Path(__file__).resolve().parents[3]
BAD_FILES = sorted((ROOT / "tests" / "configs").glob("bad_*.yaml"))
SHA256 = "2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90"


def write(folder: Path, text: str) -> Path:
    path = folder / "gateway.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(path: Path, env: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_settings(path, env or {})
    return caught.value.problems


@pytest.mark.parametrize("path", BAD_FILES, ids=lambda path: path.stem)
def test_each_mistake_gives_the_one_line_its_file_expects(path: Path) -> None:
    expected = path.read_text().splitlines()[0].removeprefix("# expect: ")
    assert problems_of(path) == [expected]


@pytest.mark.parametrize("path", BAD_FILES, ids=lambda path: path.stem)
def test_no_secret_is_quoted_back(path: Path) -> None:
    assert "a-secret" not in " ".join(problems_of(path)).replace("cache_salt_secret", "")


def test_every_problem_of_a_file_is_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "port: 0\nprot: 1\nredis: {budget_ms: 20, budget_ms: 30}\n")
    assert problems_of(path) == [
        "redis.budget_ms: is given twice (lines 3 and 3); delete one",
        "port: is 0; must be at least 1",
        "prot: is not a known key; did you mean port?",
    ]


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_settings(write(tmp_path, "# nothing\n"), {}) == GatewaySettings()


def test_the_annotated_file_shows_every_field_with_its_default() -> None:
    path = ROOT / "configs" / "gateway.yaml"
    assert load_settings(path, {}) == GatewaySettings()
    keys = {line.strip().lstrip("# -").partition(":")[0] for line in path.read_text().splitlines()}
    sections = [each for base in Section.__subclasses__() for each in (base, *base.__subclasses__())]
    models = [each for each in sections if each.__module__.startswith("gateway.settings.")]
    assert {field for model in models for field in model.model_fields} <= keys


def test_the_annotated_file_says_what_each_policy_means() -> None:
    text = (ROOT / "configs" / "gateway.yaml").read_text()
    listed = "".join(f"  #   {name}: {meaning}\n" for name, meaning in POLICIES.items())
    assert f"  # How a replica is chosen:\n{listed}  name: {DEFAULT_POLICY}\n" in text


def test_the_store_knows_exactly_these_policies() -> None:
    files = (ROOT / "coordinator" / "lua" / "policies").iterdir()
    assert {file.name.removesuffix(".lua") for file in files} == POLICIES.keys()


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "id: from-file\nredis: {url: 'redis://file:6379', budget_ms: 30}\n")
    settings = load_settings(
        path,
        {
            "KVGATE_ID": "from-env",
            "KVGATE_REDIS_URL": "rediss://env:6380/0?ssl_ca_certs=ca.pem",
            "KVGATE_CACHE_SALT_SECRET": "sixteen characters",
        },
    )
    assert (settings.id, settings.redis.url) == ("from-env", "rediss://env:6380/0?ssl_ca_certs=ca.pem")
    assert settings.redis.budget_ms == 30
    assert settings.security.cache_salt_secret is not None
    assert settings.security.cache_salt_secret.get_secret_value() == "sixteen characters"


def test_an_empty_variable_overrides_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "id: from-file\n")
    assert load_settings(path, {"KVGATE_ID": "", "KVGATE_CACHE_SALT_SECRET": ""}).id == "from-file"


def test_a_mistake_from_the_environment_names_its_variable(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    assert problems_of(path, {"KVGATE_REDIS_URL": "redis.example:6379"}) == [
        (
            "redis.url (from KVGATE_REDIS_URL): must start with redis://, rediss:// (TLS), unix:// (a socket's path), "
            "redis+sentinel:// or redis+cluster://"
        )
    ]


def test_a_salt_from_the_environment_satisfies_the_tenants(tmp_path: Path) -> None:
    text = f"security:\n  api_keys: [{{name: a, sha256: '{SHA256}', tenant: t}}]\n"
    settings = load_settings(write(tmp_path, text), {"KVGATE_CACHE_SALT_SECRET": "sixteen characters"})
    assert settings.security.api_keys[0].tenant == "t"


def test_keys_that_share_the_cache_need_no_salt() -> None:
    security = {"share_cache": True, "api_keys": [{"name": "a", "sha256": SHA256, "tenant": "t"}]}
    assert build_settings({"security": security}, {}).security.cache_salt_secret is None


def test_a_secret_for_records_needs_a_configured_key_so_that_nothing_in_redis_opens_a_gateway() -> None:
    key = {"name": "a", "sha256": SHA256, "tenant": "t"}
    security: dict[str, Any] = {"share_cache": True, "records_secret": "sixteen characters"}
    with pytest.raises(SettingsError, match="records_secret needs api_keys"):
        build_settings({"security": security | {"api_keys": []}}, {})
    build_settings({"security": security | {"api_keys": [key]}}, {})


def test_ranks_of_one_server_are_replicas_of_their_own() -> None:
    replicas = [{"id": f"r{rank}", "url": "http://10.0.0.7:8000/", "dp_rank": rank} for rank in range(2)]
    settings = build_settings({"replicas": replicas}, {})
    assert [replica.url for replica in settings.replicas] == ["http://10.0.0.7:8000"] * 2


def test_the_annotated_files_way_to_find_replicas_is_one_that_is_accepted() -> None:
    text = (ROOT / "configs" / "gateway.yaml").read_text()
    section = text.partition("discovery: {}\n")[2].partition("\n\n")[0].replace("\n#", "\n").removeprefix("#")
    found = yaml.safe_load(section)
    for other in ("selector", "inference_pool", "objective_header"):
        del found["kubernetes"][other]
    discovery = build_settings({"discovery": found}, {}).discovery
    assert discovery.dns is not None
    assert discovery.kubernetes is not None
    assert discovery.dns == DnsSettings(
        names=discovery.dns.names, server=discovery.dns.server, labels={"version": "v2"}
    )
    assert discovery.kubernetes == KubernetesSettings(
        service="vllm", namespace="models", port="http", labels={"version": "v2"}
    )


@pytest.mark.parametrize("server", ["127.0.0.1", "127.0.0.1:8600", "[2001:db8::1]:53"])
def test_a_dns_server_is_named_by_its_address(server: str) -> None:
    found = build_settings({"discovery": {"dns": {"names": ["vllm"], "server": server}}}, {}).discovery.dns
    assert found is not None
    assert found.server == server


@pytest.mark.parametrize(
    "url",
    ["redis://h", "redis://user:p%40ss@h:6379/3?health_check_interval=5", "rediss://[::1]:6380", "unix:///run/r.sock"],
)
def test_redis_urls_of_every_kind_are_accepted(url: str) -> None:
    assert build_settings({"redis": {"url": url}}, {}).redis.url == url


@pytest.mark.parametrize("url", ["redis://", "unix://", "redis://h:99999", "redis://h:port", "redis://[::1"])
def test_redis_urls_that_name_no_server_are_refused(url: str) -> None:
    with pytest.raises(SettingsError, match=r"^redis\.url: "):
        build_settings({"redis": {"url": url}}, {})


def test_a_password_does_not_show_in_the_settings_repr() -> None:
    settings = build_settings(
        {"redis": {"url": "redis://u:a-secret@h"}, "security": {"cache_salt_secret": "a-secret-of-16-chars"}}, {}
    )
    assert "a-secret" not in f"{settings!r} {settings}"


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        GatewaySettings().redis.budget_ms = 50


def test_the_default_id_is_one_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Host_7.EXAMPLE (lab) " + "x" * 60)
    assert build_settings({}, {}).id == "host_7.example--lab--xxxxxxxxxxxxxxxxxxxxxxxxxxx"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path / "missing.yaml")
    assert "cannot be read (No such file" in problem


@pytest.mark.parametrize(
    "text", ["a: 2024-99-99", "a: \x00", "? [a]: b", "a: &x [*x]", "a: !!python/object:os.system {}"]
)
def test_strange_yaml_is_a_problem_and_not_a_crash(tmp_path: Path, text: str) -> None:
    assert problems_of(write(tmp_path, text))


def test_an_anchor_used_twice_is_no_duplicate(tmp_path: Path) -> None:
    text = "replicas:\n  - &r {id: r0, url: 'http://a:1', dp_rank: 0}\n  - {<<: *r, id: r1, dp_rank: 1}\n"
    assert [replica.id for replica in load_settings(write(tmp_path, text), {}).replicas] == ["r0", "r1"]


@pytest.mark.parametrize(
    "data",
    [
        {"redis": {"url": "redis://127.0.0.1:6379/0?socket_timout=1"}},
        {"redis": {"url": "redis://127.0.0.1:6379/0?db=abc"}},
        {"replicas": [{"id": "r0", "url": "http://a..b:8000"}]},
    ],
)
def test_an_address_that_no_connection_can_be_made_of_is_refused_at_start(data: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as refused:
        build_settings(data, {})
    assert len(refused.value.problems) == 1
    assert "url" in refused.value.problems[0]


@pytest.mark.parametrize(
    "url",
    [
        *("http://h/v1/traces?key=canary", "http://canary@h/v1/traces", "http://canary@h /v1/traces"),
        *("h:4318", "http://h:99999/v1/traces", "http://h /v1/traces"),
    ],
)
def test_traces_go_to_an_address_without_secrets(url: str) -> None:
    with pytest.raises(SettingsError) as refused:
        build_settings({"tracing": {"endpoint": url}}, {})
    (problem,) = refused.value.problems
    assert problem.startswith("tracing.endpoint: ")
    assert "canary" not in problem
