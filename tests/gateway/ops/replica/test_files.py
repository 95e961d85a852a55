"""A replica's file: valid settings, the message for each mistake, and the files in configs/."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.ops.replica import settings
from gateway.ops.replica.commands import Command, commands
from gateway.ops.replica.settings import build_replica, load_replica
from gateway.settings.base import Section
from gateway.settings.config_file import SettingsError

ROOT = Path(__file__).resolve().parents[4]
GOOD_FILES = sorted((ROOT / "configs").glob("replica-*.yaml"))
BAD_FILES = sorted((ROOT / "tests" / "configs" / "replica").glob("bad_*.yaml"))
FULL_FILE = ROOT / "configs" / "replica-lmcache-cpu-redis.yaml"
MIB = 2**20
QWEN_BYTES = 57344


def names(path: Path) -> str:
    return path.stem


def options(command: Command) -> dict[str, str]:
    """A command's options. The value of each option is its last word."""
    found: dict[str, str] = {}
    name = ""
    for argument in command.argv:
        if argument.startswith("--"):
            name = argument
            found[name] = ""
        elif name:
            found[name] = argument
    return found


def of(name: str) -> dict[str, Command]:
    path = ROOT / "configs" / f"replica-{name}.yaml"
    return {command.name: command for command in commands(load_replica(path, {}))}


def test_there_is_a_file_for_each_scenario() -> None:
    assert {path.stem.removeprefix("replica-") for path in GOOD_FILES} == {
        "cpu-offload",
        "lmcache-cpu",
        "lmcache-cpu-redis",
        "lmcache-disk",
        "lmcache-mooncake",
        "lmcache-redis",
        "vllm",
    }


@pytest.mark.parametrize("path", BAD_FILES, ids=names)
def test_each_mistake_gives_the_one_line_its_file_expects(path: Path) -> None:
    expected = path.read_text().splitlines()[0].removeprefix("# expect: ")
    with pytest.raises(SettingsError) as caught:
        commands(load_replica(path, {}))
    assert caught.value.problems == [expected]
    assert "a-secret" not in expected


@pytest.mark.parametrize("path", GOOD_FILES, ids=names)
def test_each_file_says_what_it_is_for_what_it_costs_and_what_it_was_checked_with(path: Path) -> None:
    head = path.read_text().split("\n\n")[0]
    assert f"kvgate replica-command --config configs/{path.name}" in head
    assert all(re.search(rf"^# {word}: ", head, re.MULTILINE) for word in ("For", "Costs", "Checked with"))


def test_the_full_file_shows_every_field_with_its_default() -> None:
    models = [each for each in Section.__subclasses__() if each.__module__ == settings.__name__]
    keys = {line.strip().lstrip("# -").partition(":")[0] for line in FULL_FILE.read_text().splitlines()}
    assert {field for model in models for field in model.model_fields} <= keys
    replica = load_replica(FULL_FILE, {})
    least = {
        "vllm": {"model": replica.vllm.model, "max_model_len": 32768, "kv_bytes_per_token": QWEN_BYTES},
        "lmcache": {"cpu_gb": 35, "redis": {}},
    }
    assert replica == build_replica(least, {})


@pytest.mark.parametrize("path", GOOD_FILES, ids=names)
def test_what_must_be_the_same_on_all_replicas_is_in_every_files_commands(path: Path) -> None:
    found = {command.name: command for command in commands(load_replica(path, {}))}
    engine = options(found["vllm"])
    assert all(found[name].env["PYTHONHASHSEED"] == "0" for name in found if name != "agent")
    assert engine["--prefix-caching-hash-algo"] == "sha256"
    assert {"--enable-prefix-caching", "--enable-prompt-tokens-details"} <= set(engine)
    events = json.loads(engine["--kv-events-config"])
    assert (events["enable_kv_cache_events"], events["publisher"]) == (True, "zmq")
    # vLLM binds an endpoint that contains "::". This endpoint is only 127.0.0.1.
    assert events["endpoint"] == "tcp://[::ffff:127.0.0.1]:5557"
    assert events["replay_endpoint"] == "tcp://127.0.0.1:5558"
    agent = options(found["agent"])
    assert (agent["--events"], agent["--replay"]) == ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    if "--kv-transfer-config" in engine:
        assert json.loads(engine["--kv-transfer-config"])["kv_load_failure_policy"] == "recompute"
    assert list(found) == (["lmcache"] if "lmcache" in found else []) + ["agent", "vllm"]


@pytest.mark.parametrize("path", GOOD_FILES, ids=names)
def test_chunks_go_to_redis_with_a_ttl_in_1_to_4_mib_and_by_no_other_client_than_valkey(path: Path) -> None:
    found = commands(load_replica(path, {}))
    everything = json.dumps([[command.argv, command.env] for command in found])
    assert "resp" not in everything
    adapters = [json.loads(each) for command in found for each in command.argv if '"valkey"' in each]
    for adapter in adapters:
        assert adapter["ttl_seconds"] == 86400
        chunk_tokens = int(options(found[0])["--chunk-size"])
        rounds = -(-32768 // chunk_tokens // adapter["num_workers"])
        assert 2 * rounds * adapter["request_timeout"] <= 2
        assert MIB <= chunk_tokens * QWEN_BYTES <= 4 * MIB
    assert bool(adapters) == ("redis" in path.stem)


def test_vllm_alone_moves_no_kv() -> None:
    assert "--kv-transfer-config" not in of("vllm")["vllm"].argv


def test_cpu_offload_tells_of_its_blocks_under_their_own_hashes() -> None:
    engine = options(of("cpu-offload")["vllm"])
    assert (engine["--kv-offloading-size"], engine["--kv-offloading-backend"]) == ("32", "native")
    assert json.loads(engine["--kv-transfer-config"])["kv_connector_extra_config"]["self_describing_kv_events"] is True


def test_cpu_memory_is_kept_in_order_of_use() -> None:
    server = options(of("lmcache-cpu")["lmcache"])
    assert (server["--l1-size-gb"], server["--eviction-policy"]) == ("35", "LRU")
    assert "--l2-adapter" not in server
    assert "--l2-store-policy" not in server


def test_straight_to_redis_keeps_nothing_in_cpu_memory() -> None:
    server = options(of("lmcache-redis")["lmcache"])
    assert (server["--l2-store-policy"], server["--eviction-policy"]) == ("skip_l1", "noop")


def test_a_disk_is_bounded_by_evicting_from_it() -> None:
    adapter = json.loads(options(of("lmcache-disk")["lmcache"])["--l2-adapter"])
    assert (adapter["type"], adapter["max_capacity_gb"]) == ("fs_native", 500)
    assert adapter["eviction"]["eviction_policy"] == "LRU"


def test_a_mooncake_store_is_found_over_tcp_and_a_silent_master_delays_no_request_for_long() -> None:
    server = of("lmcache-mooncake")["lmcache"]
    adapter = json.loads(options(server)["--l2-adapter"])
    assert (adapter["type"], adapter["protocol"]) == ("mooncake_store", "tcp")
    assert (adapter["master_server_addr"], adapter["local_hostname"]) == ("10.0.0.4:50051", "10.0.0.7")
    assert adapter["global_segment_size"] == str(32 * 1024 * MIB)
    assert server.env["MC_RPC_TIMEOUT_MS"] == server.env["MC_RPC_CONNECT_TIMEOUT_MS"] == "1000"
    assert "MC_RPC_TIMEOUT_MS" not in of("lmcache-redis")["lmcache"].env


def test_the_server_and_the_engine_agree_on_where_it_is_and_how_it_hashes() -> None:
    found = of("lmcache-cpu-redis")
    server, transfer = options(found["lmcache"]), json.loads(options(found["vllm"])["--kv-transfer-config"])
    told = transfer["kv_connector_extra_config"]
    assert server["--host"] == server["--http-host"] == "127.0.0.1"
    assert f"{told['lmcache.mp.host']}:{told['lmcache.mp.port']}" == f"tcp://127.0.0.1:{server['--port']}"
    assert told["lmcache.mp.hash_algorithm"] == server["--hash-algorithm"] == "blake3"


def test_the_environment_makes_one_file_serve_a_fleet() -> None:
    env = {
        "KVGATE_REPLICA_ID": "r7",
        "KVGATE_REDIS_URL": "redis://gateways:6379",
        "KVGATE_LMCACHE_URL": "rediss://chunks:6380/2",
    }
    found = {command.name: command for command in commands(load_replica(FULL_FILE, env))}
    adapter = json.loads(options(found["lmcache"])["--l2-adapter"])
    assert (adapter["startup_nodes"], adapter["tls_enable"], adapter["database_id"]) == ("chunks:6380", True, 2)
    assert found["agent"].env == {"KVGATE_REDIS_URL": "redis://gateways:6379"}
    assert options(found["agent"])["--replica"] == options(found["lmcache"])["--instance-id"] == "r7"


def test_an_address_for_chunks_does_not_make_them_go_there() -> None:
    path = ROOT / "configs" / "replica-lmcache-cpu.yaml"
    (server, *_) = commands(load_replica(path, {"KVGATE_LMCACHE_URL": "redis://chunks:6380"}))
    assert "--l2-adapter" not in server.argv


def test_an_agent_has_the_control_port_of_its_file() -> None:
    data: dict[str, Any] = {"vllm": {"model": "m", "max_model_len": 64}, "agent": {"control_port": 8001}}
    assert options(commands(build_replica(data, {}))[0])["--control-port"] == "8001"
    assert "--control-port" not in options(commands(build_replica({"vllm": data["vllm"]}, {}))[0])
    with pytest.raises(SettingsError, match="port 8000 is given twice"):
        build_replica(data | {"agent": {"control_port": 8000}}, {})


def test_every_interface_is_what_vllm_writes_as_a_star() -> None:
    data: dict[str, Any] = {"vllm": {"model": "m", "max_model_len": 64}, "events": {"host": "0.0.0.0"}}
    agent, engine = commands(build_replica(data, {}))
    assert json.loads(options(engine)["--kv-events-config"])["endpoint"] == "tcp://*:5557"
    assert options(agent)["--events"] == "tcp://127.0.0.1:5557"
