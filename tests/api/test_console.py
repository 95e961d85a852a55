"""The console shows the whole cluster on each gateway, to admins only, and asks no other origin."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from bench.cluster import Cluster
from coordinator.keys import console_secret_key
from gateway.console import routes
from gateway.console.sessions import COOKIE
from gateway.ops.cli.watch import parsed_events
from tests.api.conftest import GUARDED
from tests.api.stage import PATIENT_REDIS, Stage, chat_body, fresh, running_gateway
from tests.coordinator.test_acl import RULES
from tests.polling import wait_until

PAGE = Path(routes.__file__).parent / "page"
ASSETS = tuple(f"/console/{file.name}" for file in PAGE.iterdir() if file.suffix in (".js", ".css"))


@pytest.fixture
def browser(guarded: Stage) -> Iterator[httpx.Client]:
    """Keeps cookies, as a browser does, and is not logged in."""
    with httpx.Client(timeout=20) as client:
        yield client


def log_in(browser: httpx.Client, url: str, key: str) -> httpx.Response:
    return browser.post(f"{url}/console/login", data={"key": key})


def events(url: str, cookies: dict[str, str] | None = None) -> Iterator[tuple[str, Any]]:
    with httpx.stream("GET", f"{url}/console/live", timeout=20, cookies=cookies) as response:
        assert response.status_code == 200, response.read()
        yield from parsed_events(response.iter_lines())


def first_cluster(url: str, cookies: dict[str, str] | None = None) -> dict[str, Any]:
    return next(data for name, data in events(url, cookies) if name == "cluster")


def test_without_keys_it_is_open_and_names_nothing_of_another_origin(stage: Stage) -> None:
    for path in ("/console", *ASSETS):
        answer = stage.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http:" not in policy
        assert "https:" not in answer.text
        assert "<style" not in answer.text
        assert " style=" not in answer.text
    assert stage.get("/console/../app.py").status_code == 404
    assert stage.get("/console/sessions.py").status_code == 404


def test_each_gateway_shows_all_gateways_and_replicas_and_the_last_minutes(stage: Stage, open_cluster: Cluster) -> None:
    for url in stage.gateways:
        seen = first_cluster(url)
        assert {one["id"].partition(".")[0] for one in seen["gateways"]} >= {"gw0", "gw1"}
        assert {one["id"] for one in seen["replicas"]} >= {"r0", "r1", "r2"}
        assert all("sim" in seen["models_of_pools"][one["pool"]] for one in seen["replicas"])
        assert seen["store"] == "up"
        wait_until(lambda url=url: any(pool["history"] for pool in first_cluster(url)["pools"]), within_s=15)
        [point, *_] = next(pool["history"] for pool in first_cluster(url)["pools"] if pool["history"])
        assert abs(point[0] / 1000 - time.time()) < 1000
        assert point[1] is not None


def test_it_shows_the_requests_of_other_gateways_as_they_end(stage: Stage) -> None:
    request_id = fresh("console")
    wanted = [name for name, _ in _until(stage, request_id)]
    assert "decisions" in wanted


def _until(stage: Stage, request_id: str) -> Iterator[tuple[str, Any]]:
    for name, data in events(stage.gateways[0]):
        yield name, data
        if name == "decisions" and any(record["request_id"] == request_id for record in data):
            assert "messages" not in json.dumps(data)
            return
        stage.post("/v1/chat/completions", chat_body(fresh()), 1, headers={"x-request-id": request_id})


def test_with_keys_it_needs_an_admin_key_and_says_so(guarded: Stage, browser: httpx.Client) -> None:
    url = guarded.gateways[0]
    answer = browser.get(f"{url}/console")
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/login")
    assert browser.get(f"{url}/console/live").json()["error"]["code"] == "login_required"
    for key, status, words in (("", 401, "Enter"), ("wrong", 401, "not known"), ("secret-alice", 403, "no admin key")):
        answer = log_in(browser, url, key)
        assert (answer.status_code, words in answer.text, dict(browser.cookies)) == (status, True, {})
    assert log_in(browser, url, "x" * 5000).status_code == 413


def test_a_session_is_good_at_all_gateways_and_for_the_console_only(guarded: Stage, browser: httpx.Client) -> None:
    answer = log_in(browser, guarded.gateways[0], "secret-root")
    cookie = answer.headers["set-cookie"].lower()
    assert all(flag in cookie for flag in ("httponly", "samesite=strict", "path=/console", "max-age=43200"))
    assert "secure" not in cookie
    assert "secret-root" not in cookie
    held = {COOKIE: answer.cookies[COOKIE]}
    for url in guarded.gateways:
        assert httpx.get(f"{url}/console", cookies=held).status_code == 200
        assert first_cluster(url, held)["replicas"]
        assert httpx.get(f"{url}/v1/queue", cookies=held).status_code == 401
    over_tls = httpx.post(
        f"{guarded.gateways[0]}/console/login", data={"key": "secret-root"}, headers={"x-forwarded-proto": "https"}
    )
    assert "secure" in over_tls.headers["set-cookie"].lower()


def test_a_session_that_was_changed_or_is_over_is_none(guarded: Stage, browser: httpx.Client) -> None:
    url = guarded.gateways[0]
    good = log_in(browser, url, "secret-root").cookies[COOKIE]
    name, until, nonce, signature = good.split(".")
    others = (
        f"{b'alice'.hex()}.{until}.{nonce}.{signature}",
        f"{name}.{int(until) + 1}.{nonce}.{signature}",
        f"{name}.{until}.{nonce[::-1]}.{signature}",
        f"{name}.{until}.{signature}",
        f"{name}.1.{nonce}.{signature}",
        f"{name}.{until}.{nonce}.",
        *("", ".", "..", "a.b.c", "\xb2.\xb2.\xb2", "zz.99999999999." + signature, f"{name}.{'9' * 5000}.x"),
    )
    for cookie in others:
        answer = httpx.get(f"{url}/console", headers=[(b"cookie", f"{COOKIE}={cookie}".encode("latin-1"))])
        assert (answer.status_code, cookie) == (303, cookie)


def test_a_store_that_was_emptied_ends_sessions_and_a_new_login_is_good_everywhere(
    guarded: Stage, guarded_cluster: Cluster, browser: httpx.Client
) -> None:
    log_in(browser, guarded.gateways[1], "secret-root")
    with redis.Redis.from_url(guarded_cluster.redis_url) as store:
        store.delete(console_secret_key())
    browser.cookies.set(COOKIE, "of.another.secret")
    ended = browser.get(f"{guarded.gateways[0]}/console")
    assert (ended.status_code, ended.headers["location"]) == (303, "/console/login?ended")
    assert "Your session has ended" in browser.get(f"{guarded.gateways[0]}/console/login?ended").text
    held = {COOKIE: log_in(browser, guarded.gateways[0], "secret-root").cookies[COOKIE]}
    wait_until(lambda: httpx.get(f"{guarded.gateways[1]}/console", cookies=held).status_code == 200)


def test_logging_out_needs_the_token_of_the_page(guarded: Stage, browser: httpx.Client) -> None:
    url = guarded.gateways[0]
    held = {COOKIE: log_in(browser, url, "secret-root").cookies[COOKIE]}
    token = token_of(httpx.get(f"{url}/console", cookies=held).text)
    assert len(token) == 64
    for wrong in ({}, {"x-kvgate-csrf": "0" * 64}):
        assert httpx.post(f"{url}/console/logout", cookies=held, headers=wrong).status_code == 403
    answer = httpx.post(f"{url}/console/logout", cookies=held, headers={"x-kvgate-csrf": token})
    assert (answer.status_code, "max-age=0" in answer.headers["set-cookie"].lower()) == (204, True)
    other = {COOKIE: log_in(browser, url, "secret-root").cookies[COOKIE]}
    for gateway in guarded.gateways:  # whoever kept the cookie has nothing of it
        assert httpx.get(f"{gateway}/console", cookies=held).status_code == 303
        assert httpx.get(f"{gateway}/console/prefixes", cookies=held).status_code == 401
        assert httpx.get(f"{gateway}/console/prefixes", cookies=other).status_code == 200


def test_who_tries_keys_is_slowed_down_logged_and_counted(
    guarded_cluster: Cluster, guarded: Stage, tmp_path: Path
) -> None:
    with running_gateway(tmp_path, guarded_cluster.redis_url, guarded.sims, {"security": GUARDED["security"]}) as url:
        tried = [httpx.post(f"{url}/console/login", data={"key": f"guess {number}"}) for number in range(14)]
        assert [answer.status_code for answer in tried] == [401] * 10 + [429] * 4
        assert int(tried[-1].headers["retry-after"]) > 0
        assert "Too many failed logins" in tried[-1].text
        assert httpx.post(f"{url}/console/login", data={"key": "secret-root"}).status_code == 429
        counted = httpx.get(f"{url}/metrics").text
        assert 'kvgate_console_logins_total{outcome="invalid_api_key"} 10.0' in counted
        assert 'kvgate_console_logins_total{outcome="too_many_logins"} 5.0' in counted
    log = next(tmp_path.glob("*.log")).read_text()
    assert log.count("login refused") == 10
    assert "guess" not in log


def test_a_prompt_is_explained_to_a_page_of_the_session_only(guarded: Stage, browser: httpx.Client) -> None:
    url = guarded.gateways[0]
    held = {COOKIE: log_in(browser, url, "secret-root").cookies[COOKIE]}
    body = chat_body(fresh("a prompt " * 50))
    assert httpx.post(f"{url}/console/explain", json=body).status_code == 401
    assert httpx.get(f"{url}/console/prefixes").status_code == 401
    assert httpx.get(f"{url}/console/usage").status_code == 401
    assert httpx.get(f"{url}/console/budgets").status_code == 401
    assert httpx.post(f"{url}/console/explain", json=body, cookies=held).status_code == 403
    token = token_of(httpx.get(f"{url}/console", cookies=held).text)
    told = httpx.post(f"{url}/console/explain", json=body, cookies=held, headers={"x-kvgate-csrf": token}).json()
    assert told["choice"]["replica"] in {each["replica"] for each in told["replicas"]}
    assert all("cost" in each for each in told["replicas"])
    wrong = httpx.post(f"{url}/console/explain", content=b"{", cookies=held, headers={"x-kvgate-csrf": token})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid_json")


def test_a_prompt_is_sent_for_a_page_of_the_session_only(guarded: Stage, browser: httpx.Client) -> None:
    url = guarded.gateways[1]
    held = {COOKIE: log_in(browser, guarded.gateways[0], "secret-root").cookies[COOKIE]}
    token = token_of(httpx.get(f"{url}/console", cookies=held).text)
    body, sent = chat_body(fresh(), stream=True), f"{url}/console/chat"
    for cookies, headers, status in (({}, {}, 401), (held, {}, 403), ({}, {"x-kvgate-csrf": token}, 401)):
        assert httpx.post(sent, json=body, cookies=cookies, headers=headers).status_code == status
    answer = httpx.post(sent, json=body, cookies=held, headers={"x-kvgate-csrf": token})
    assert answer.text.endswith("data: [DONE]\n\n")
    beside_others = {"cookie": f'a={{"x":1}}; {COOKIE}={held[COOKIE]}', "x-kvgate-csrf": token}
    assert httpx.post(sent, json=body, headers=beside_others).status_code == 200
    assert answer.headers["x-kvgate-replica"] in {sim.id for sim in guarded.sims}
    assert httpx.get(sent, cookies=held).status_code == 404


def test_a_replica_is_drained_for_a_page_of_a_session_only_at_any_gateway(guarded: Stage, stage: Stage) -> None:
    name = guarded.sims[0].id
    path = f"/console/replicas/{name}/drain"
    with httpx.Client(timeout=20) as browser:
        held = {COOKIE: log_in(browser, guarded.gateways[0], "secret-root").cookies[COOKIE]}
    for url, action, state in ((guarded.gateways[0], "drain", "draining"), (guarded.gateways[1], "undrain", "ready")):
        token = token_of(httpx.get(f"{url}/console", cookies=held).text)
        good = {"x-kvgate-csrf": token, "content-type": "application/json"}
        for cookies, headers, status in (({}, good, 401), (held, {}, 403), (held, {"x-kvgate-csrf": token}, 415)):
            assert httpx.post(url + path, cookies=cookies, headers=headers).status_code == status
        told = httpx.post(f"{url}/console/replicas/{name}/{action}", cookies=held, headers=good).json()
        assert (told["id"], told["state"]) == (name, state)
    unknown = httpx.post(f"{guarded.gateways[0]}/console/replicas/none/drain", cookies=held, headers=good)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "replica_not_found")
    # Without keys there is no token: then only the content type keeps pages of other origins out.
    assert httpx.post(f"{stage.gateways[0]}/console/replicas/{stage.sims[0].id}/drain").status_code == 415


def token_of(page: str) -> str:
    """What pages send with their actions."""
    return page.partition('name="token" content="')[2].partition('"')[0]


def test_the_prefixes_that_were_used_last_are_told_with_who_holds_them(stage: Stage) -> None:
    text = fresh("a prefix ") * 100
    for number in range(3):
        last = stage.chat(f"{text} {number}")

    def held() -> list[dict[str, Any]]:
        found = stage.get("/console/prefixes").json()["prefixes"]
        return [each for each in found if each["tokens"] and any(o["kind"] == "resident" for o in each["owners"])]

    wait_until(lambda: any(last.replica == o["replica"] for each in held() for o in each["owners"]), within_s=15)
    [hottest, *_] = stage.get("/console/prefixes").json()["prefixes"]
    assert hottest["copies"] == len(hottest["owners"])


def test_it_needs_no_more_rights_in_redis_than_the_rest(
    guarded: Stage, guarded_cluster: Cluster, tmp_path: Path
) -> None:
    url = guarded_cluster.redis_url.replace("redis://", "redis://limited:secret@")
    limited = {"redis": {"url": url, **PATIENT_REDIS, "namespace": "limited"}, "security": GUARDED["security"]}
    with redis.Redis.from_url(guarded_cluster.redis_url) as store:
        store.execute_command("ACL", "SETUSER", "limited", *RULES)
        with running_gateway(tmp_path, url, guarded.sims, limited) as gateway, httpx.Client() as browser:
            held = {COOKIE: log_in(browser, gateway, "secret-root").cookies[COOKIE]}
            wait_until(lambda: any(pool["history"] for pool in first_cluster(gateway, held)["pools"]), within_s=15)
            assert not any("refused" in one["what"] for one in first_cluster(gateway, held)["problems"])
            assert httpx.get(f"{gateway}/console/prefixes", cookies=held).status_code == 200
        store.execute_command("ACL", "DELUSER", "limited")


def test_a_setting_turns_it_off(stage: Stage, open_cluster: Cluster, tmp_path: Path) -> None:
    with running_gateway(tmp_path, open_cluster.redis_url, stage.sims, {"console": {"enabled": False}}) as url:
        for path in ("/console", "/console/login", "/console/live", *ASSETS):
            assert httpx.get(url + path).status_code == 404
        assert httpx.post(f"{url}/console/chat", json=chat_body(fresh())).status_code == 404
