"""The commands for API keys, on a cluster of `kvgate up`."""

from __future__ import annotations

import json
import stat
from hashlib import sha256
from typing import Any

import httpx
import pytest
import yaml

from tests.gateway.ops.cli.conftest import Kvgate
from tests.gateway.ops.cli.test_commands import one_line_error
from tests.polling import wait_until

OPS = "ops-key-0123456789"


@pytest.fixture(scope="module")
def kvgate(shared_kvgate: Kvgate) -> Kvgate:
    """A running cluster whose configuration has one admin key, and no secret for records."""
    key = {"name": "ops", "tenant": "ops", "admin": True, "sha256": sha256(OPS.encode()).hexdigest()}
    file = shared_kvgate.folder / "keys.yaml"
    file.write_text(yaml.safe_dump({"security": {"api_keys": [key], "share_cache": True}}))
    result = shared_kvgate.up("--detach", "--config", str(file), env={"KVGATE_API_KEY": OPS})
    assert result.returncode == 0, result.stderr
    return shared_kvgate


def typed(kvgate: Kvgate, *words: str, api_key: str = OPS) -> Any:
    options = ("--state-dir", str(kvgate.state_dir))
    return kvgate.call(*words, *options, env={"KVGATE_API_KEY": api_key})


def serve(kvgate: Kvgate, api_key: str) -> set[int]:
    """What each gateway answers to this key."""
    headers = {"authorization": f"Bearer {api_key}"}
    urls = [gateway["url"] for gateway in kvgate.cluster()["gateways"]]
    return {httpx.get(f"{url}/v1/models", headers=headers, trust_env=False, verify=False).status_code for url in urls}


def test_a_cluster_with_an_admin_key_signs_keys_with_a_secret_that_is_its_owners_alone(kvgate: Kvgate) -> None:
    file = kvgate.state_dir / "records_secret"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    configs = [yaml.safe_load((kvgate.state_dir / f"gw{n}.yaml").read_text()) for n in range(2)]
    assert {config["security"]["records_secret"] for config in configs} == {file.read_text().strip()}


def test_a_key_is_made_listed_replaced_and_revoked(kvgate: Kvgate) -> None:
    options = ("--model", "sim", "--expires-days", "7", "--requests-per-min", "60", "--concurrency", "2")
    made = typed(kvgate, "keys", "create", "batch", "--tenant", "research", *options)
    assert made.returncode == 0, made.stderr
    api_key = made.stdout.strip()
    assert "shown only now" in made.stderr
    wait_until(lambda: serve(kvgate, api_key) == {200})
    [listed] = [
        key
        for key in json.loads(typed(kvgate, "keys", "list", "--json").stdout)["keys"]
        if key["state"] != "configured"
    ]
    assert listed["limits"] == {"concurrency": 2, "requests_per_min": 60}
    shown = [line for line in typed(kvgate, "keys", "list").stdout.splitlines() if listed["id"] in line]
    assert len(shown) == 1
    assert all(word in shown[0] for word in ("batch", "research", "valid", "sim"))
    assert api_key not in str(listed) + shown[0]
    rotated = typed(kvgate, "keys", "rotate", listed["id"], "--overlap-hours", "0")
    other = rotated.stdout.strip()
    wait_until(lambda: (serve(kvgate, other), serve(kvgate, api_key)) == ({200}, {401}))
    new_id = rotated.stderr.partition("(")[2].partition(")")[0]
    assert f"It replaces {listed['id']}, which is valid until " in rotated.stderr
    assert [key["in_place_of"] for key in json.loads(typed(kvgate, "keys", "list", "--json").stdout)["keys"]] == [
        None,
        None,
        listed["id"],
    ]
    assert f"  {listed['id']}\n" in typed(kvgate, "keys", "list").stdout
    revoked = typed(kvgate, "keys", "revoke", new_id)
    assert revoked.stdout == f"batch ({new_id}) of research is revoked\n"
    wait_until(lambda: serve(kvgate, other) == {401})
    told = typed(kvgate, "audit").stdout.splitlines()
    assert [line.partition("UTC  ")[2] for line in told[:3]] == [
        f"ops revoked key batch ({new_id}) of tenant research",
        f"ops rotated key batch ({new_id}) in place of {listed['id']} of tenant research",
        f"ops created key batch ({listed['id']}) of tenant research",
    ]


def test_mistakes_are_told_in_one_line(kvgate: Kvgate) -> None:
    assert "there is no such key" in one_line_error(typed(kvgate, "keys", "revoke", "k-none"))
    assert "is in the configuration file" in one_line_error(typed(kvgate, "keys", "revoke", "ops"))
    assert "expires_days" in one_line_error(typed(kvgate, "keys", "create", "x", "--expires-days", "400"))
    assert "KVGATE_API_KEY" in one_line_error(typed(kvgate, "keys", "list", api_key="wrong"))


def test_a_keys_budgets_are_typed_like_amounts_and_shown_with_what_is_spent(kvgate: Kvgate) -> None:
    assert typed(kvgate, "budgets").stdout == "No budgets that your key may see.\n"
    options = ("--budget", "month=100.00", "--budget", "day=1000000tokens")
    made = typed(kvgate, "keys", "create", "intern", "--tenant", "research", *options)
    assert made.returncode == 0, made.stderr
    assert "100 USD/month, 1000000 tokens/day" in typed(kvgate, "keys", "list").stdout

    def rows() -> list[list[str]]:
        shown = typed(kvgate, "budgets").stdout.splitlines()
        return [line.split()[:8] for line in shown if "intern" in line]

    assert wait_until(rows) == [
        ["research", "intern", "day", "tokens", "1,000,000", "0", "0", "1,000,000"],
        ["research", "intern", "month", "USD", "100.0000", "0.0000", "0.0000", "100.0000"],
    ]
    assert wait_until(lambda: serve(kvgate, made.stdout.strip()) == {200})
    assert "opens again (UTC)" in typed(kvgate, "budgets").stdout
    told = typed(kvgate, "budgets", "--json", api_key=made.stdout.strip())
    assert told.returncode == 0, told.stderr
    [day, month] = json.loads(told.stdout)["budgets"]
    assert (day["per"], month["budget"], month["key"]) == ("day", 100.0, "intern")
    for wrong in ("year=1", "month", "month=x", "month=-1", "day=1.5tokens"):
        refused = typed(kvgate, "keys", "create", "other", "--budget", wrong)
        assert refused.returncode == 2
        assert "month=100.00" in refused.stderr
