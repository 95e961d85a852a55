"""The console in a real browser: login, views that change under load, and no request to another origin."""

from __future__ import annotations

import os
import re
import signal
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import redis
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from bench.cluster import Cluster, running_cluster
from tests.api.stage import api_key, bearer, chat_body, fresh, running_gateway
from tests.polling import PATIENCE_S, wait_until
from tests.programs import CHROMIUM, needs

pytestmark = needs("chromium")

CONFIG: dict[str, Any] = {
    "redis": {"budget_ms": 500},
    "policy": {"max_active_requests": 1},
    "billing": {"currency": "EUR", "prices": [{"model": "sim", "output_per_mtok": 100.0}]},
    "tenants": [
        {
            "name": "research",
            "limits": {"concurrency": 40},
            "budgets": [{"per": "day", "money": 50.0}, {"per": "month", "tokens": 10_000_000, "soft": 1e-6}],
        }
    ],
    "models": [
        {
            "name": "chat",
            "aliases": ["also"],
            "backends": [
                {"name": "v1", "match": {"model": "sim"}, "weight": 9},
                {"name": "v2", "match": {"model": "none"}, "weight": 0},
            ],
        }
    ],
    "security": {
        "api_keys": [api_key("alice", "research"), api_key("root", "operations", admin=True)],
        "cache_salt_secret": "canary-cache-salt-secret",
    },
}
SHOWN_WITHIN_S = 3.0
"""How soon the page has to show that a replica was killed."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(gateways=2, replicas=3, replica_arguments=("--speed", "1"), config=CONFIG) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # Its sandbox needs rights that containers lack. It only opens pages of our own gateways.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        expect.set_options(timeout=PATIENCE_S * 1000)  # Playwright's own 5 s are few on a busy machine
        yield browser
        browser.close()


@contextmanager
def page_of(browser: Browser, url: str, **options: Any) -> Iterator[tuple[Page, list[str]]]:
    """A page in a browser without cookies, and what went wrong there: errors, and requests to other origins."""
    context = browser.new_context(**options)
    page, wrong = context.new_page(), list[str]()
    own = urlsplit(url).netloc
    page.on("request", lambda asked: wrong.append(asked.url) if urlsplit(asked.url).netloc != own else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
    yield page, wrong
    context.close()
    assert wrong == []


def log_in(page: Page, url: str, view: str = "overview") -> None:
    page.goto(f"{url}/console#{view}")
    page.get_by_label("Admin key").fill("secret-root")
    page.get_by_role("button", name="Log in").click()
    expect(page.locator("#link")).to_contain_text("live, from")


def ask(url: str, request_id: str, **fields: Any) -> None:
    headers = {**bearer("alice"), "x-request-id": request_id}
    answer = httpx.post(f"{url}/v1/chat/completions", json=chat_body(fresh(), **fields), headers=headers, timeout=20)
    assert answer.status_code == 200


def wait_until_shown_live(page: Page, url: str) -> None:
    """Within a second of its opening, the page is told of requests at `url`. Rows of earlier ones prove nothing."""

    asked: set[str] = set()

    def is_shown() -> bool:
        asked.add(request_id := fresh("other"))
        ask(url, request_id)
        rows = page.locator("#records tr[data-request]")
        return not asked.isdisjoint(rows.evaluate_all("rows => rows.map((row) => row.dataset.request)"))

    wait_until(is_shown)


def test_it_lets_in_who_shows_an_admin_key_and_lets_go(browser: Browser, cluster: Cluster) -> None:
    url = cluster.gateway_urls[0]
    with page_of(browser, url) as (page, _):
        page.goto(f"{url}/console")
        page.get_by_label("Admin key").fill("secret-alice")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert")).to_contain_text("no admin key")
        log_in(page, url, "queue")
        expect(page.locator("#waiting")).to_be_visible()  # the view that was asked for before the login
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_label("Admin key")).to_be_visible()
        page.goto(f"{url}/console")
        expect(page.get_by_label("Admin key")).to_be_visible()


def test_requests_of_the_other_gateway_appear_and_open(browser: Browser, cluster: Cluster) -> None:
    with page_of(browser, cluster.gateway_urls[0], color_scheme="dark") as (page, _):
        log_in(page, cluster.gateway_urls[0])
        page.get_by_role("link", name="Decisions").click()
        wanted = fresh("wanted")
        wait_until_shown_live(page, cluster.gateway_urls[1])
        ask(cluster.gateway_urls[1], wanted)
        page.get_by_label("Request id").fill(wanted)
        row = page.locator(f"#records tr[data-request='{wanted}']")
        expect(page.locator("#records tr")).to_have_count(1)
        expect(row).to_contain_text("research")
        page.reload()
        expect(row).to_be_visible()
        row.click()
        expect(page.locator("#because")).to_contain_text("none that was looked at holds any of the prompt")
        expect(page.get_by_role("dialog")).to_contain_text("/v1/chat/completions")
        expect(page.get_by_role("dialog")).to_contain_text("gw1")
        considered = page.locator("#considered tr")
        expect(considered).to_have_count(3)
        expect(considered.locator("td.good")).to_have_count(1)


def test_a_stream_that_went_on_elsewhere_names_the_replica_that_broke_it_off(
    browser: Browser, cluster: Cluster
) -> None:
    def fail(mode: str) -> None:
        for replica in cluster.replicas:
            httpx.post(f"{replica.url}/sim/fail", json={"mode": mode, "after_tokens": 9}).raise_for_status()

    with page_of(browser, cluster.gateway_urls[0]) as (page, _):
        log_in(page, cluster.gateway_urls[0], "decisions")
        wait_until_shown_live(page, cluster.gateway_urls[0])
        wanted = fresh("broken")
        fail("cut")
        ask(cluster.gateway_urls[0], wanted, stream=True, max_tokens=12)
        fail("none")
        expect(page.locator(f"#records tr[data-request='{wanted}']")).to_contain_text(re.compile(r"cold resumed=r\d"))


def test_who_waits_is_shown_and_gone_when_served(browser: Browser, cluster: Cluster) -> None:
    url = cluster.gateway_urls[1]
    with page_of(browser, url) as (page, _):
        log_in(page, url)
        page.get_by_role("link", name="Queue").click()
        expect(page.locator("#waiting")).to_contain_text("Nobody waits")
        with httpx.Client(base_url=url, headers=bearer("alice"), timeout=30) as http, held(http, 5):
            expect(page.locator("#waiting")).to_contain_text("no replica has room")
            expect(page.locator("#rooms")).to_contain_text("1 of 1")
        expect(page.locator("#waiting")).to_contain_text("Nobody waits")


def test_nothing_scrolls_sideways_from_a_phone_to_a_wide_screen(browser: Browser, cluster: Cluster) -> None:
    url = cluster.gateway_urls[0]
    with page_of(browser, url) as (page, _):
        log_in(page, url, "decisions")
        rows = page.locator("#records tr[data-request]")
        wait_until(lambda: ask(url, fresh("row")) or rows.count() > 1)
        for width, is_card in ((390, True), (1180, False), (1400, False)):
            page.set_viewport_size({"width": width, "height": 800})
            page.reload()
            for view in ("Overview", "Decisions", "Prefixes", "Queue", "Store", "Usage", "Ask"):
                page.get_by_role("link", name=view).click()
                expect(page.locator("main > section:visible tbody tr").first).to_be_visible()
                wide = page.evaluate(_WIDER_THAN_THE_SCREEN)
                assert wide == [], f"{view} at {width}"
            page.get_by_role("link", name="Overview").click()
            first = page.get_by_role("cell", name="tells what it holds").first
            assert (first.evaluate("cell => getComputedStyle(cell, '::before').content") == '"Agent: "') is is_card


_WIDER_THAN_THE_SCREEN = """
[document.documentElement, ...document.querySelectorAll(".scroll")]
    .filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.innerText.slice(0, 200))
"""


def test_each_backend_of_a_model_tells_its_weight_replicas_and_requests(browser: Browser, cluster: Cluster) -> None:
    url, other = cluster.gateway_urls
    with page_of(browser, url) as (page, _):
        log_in(page, url)
        row, lost = (page.locator(f"#backends tr[data-key='chat {name}']") for name in ("v1", "v2"))
        wait_until(lambda: streamed(other, fresh(), model="also") and told(row, "TTFT p50").inner_text().endswith("s"))
        told_of = {name: told(row, name) for name in ("Weight", "Ready replicas", "Requests/s", "Errors")}
        expect(told_of["Weight"]).to_have_text("9")
        expect(told_of["Ready replicas"]).to_have_text("3")
        expect(told_of["Requests/s"]).to_have_text(A_NUMBER)
        expect(told_of["Errors"]).to_have_text("0")
        expect(told(lost, "Requests/s")).to_have_text("0")
        expect(told(lost, "Ready replicas")).to_have_text("0")


def test_each_replica_tells_its_requests_ttft_and_errors_at_whichever_gateway(
    browser: Browser, cluster: Cluster
) -> None:
    url, other = cluster.gateway_urls
    with page_of(browser, url) as (page, _):
        log_in(page, url)
        expect(page.locator("#since")).to_contain_text("since the page opened")
        served = streamed(other, text := fresh())
        row = page.locator(f"#replicas tr[data-key={served}]")
        # A page counts from a second after it was opened.
        wait_until(lambda: streamed(other, text) and told(row, "TTFT p50").inner_text().endswith("s"))
        expect(told(row, "Requests/s")).to_have_text(A_NUMBER)
        expect(told(row, "Errors")).to_have_text("0")
        expect(page.locator("#totals")).to_contain_text(re.compile(r"2 gateways · [0-9.]*[1-9] requests/s · 0 waiting"))
        for replica in cluster.replicas:
            if replica.id != served:
                expect(told(page.locator(f"#replicas tr[data-key={replica.id}]"), "Requests/s")).to_have_text("0")
            replica.fail("cut", after_tokens=1)
        streamed(other, fresh())
        expect(page.get_by_role("table").locator("td.bad[data-label=Errors]")).to_have_text("1")
        for replica in cluster.replicas:
            replica.fail("none")
        page.get_by_role("link", name="Decisions").click()
        expect(page.locator("#records td.bad")).to_have_text("200, broken")


A_NUMBER = re.compile(r"^[0-9.]*[1-9]$")


def streamed(url: str, text: str, **fields: Any) -> str:
    """The replica that has streamed an answer."""
    body, headers = chat_body(text, stream=True, **fields), bearer("root")
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=20).headers["x-kvgate-replica"]


def told(row: Locator, title: str) -> Locator:
    return row.locator(f"td[data-label='{title}']")


@contextmanager
def held(http: httpx.Client, count: int) -> Iterator[None]:
    """So many streams of long answers are open, or wait."""

    def read() -> None:
        with http.stream(
            "POST", "/v1/chat/completions", json=chat_body(fresh(), stream=True, max_tokens=2000)
        ) as answer:
            for _ in answer.iter_lines():
                if over.is_set():
                    return

    over = threading.Event()
    readers = [threading.Thread(target=read) for _ in range(count)]
    for reader in readers:
        reader.start()
    try:
        yield
    finally:
        over.set()
        for reader in readers:
            reader.join()


def test_a_prompt_with_an_image_is_explained_as_it_is_then_placed(
    browser: Browser, cluster: Cluster, tmp_path: Path
) -> None:
    url, text = cluster.gateway_urls[0], fresh("<b>explained</b> ") * 40
    image = tmp_path / "image.png"
    Image.new("RGB", (64, 64), "red").save(image)
    with page_of(browser, url) as (page, _):
        log_in(page, url)
        page.get_by_role("link", name="Ask").click()
        page.get_by_label("Prompt", exact=True).fill(text)
        page.get_by_label("Image").set_input_files(image)
        page.get_by_role("button", name="Explain").click()
        expect(page.locator("#choice")).to_contain_text("cold")
        expect(page.locator("#costs tr")).to_have_count(3)
        expect(page.locator("#chain")).to_contain_text("nobody")
        part = {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{b64encode(image.read_bytes()).decode()}"},
        }
        body = {"model": "sim", "messages": [{"role": "user", "content": [part, {"type": "text", "text": text}]}]}
        headers = bearer("root")
        answer = httpx.post(f"{url}/v1/chat/completions", json=body | {"max_tokens": 2}, headers=headers, timeout=20)
        page.get_by_role("button", name="Explain").click()
        page.locator("#choice", has_text="It would go to").wait_for()
        expect(page.locator("#choice")).to_contain_text(f"It would go to {answer.headers['x-kvgate-replica']} (hit)")
        expect(page.locator("#chain")).to_contain_text(f"{answer.headers['x-kvgate-replica']} (gpu")


def test_a_prompt_is_sent_and_its_answer_is_watched_as_it_comes(browser: Browser, cluster: Cluster) -> None:
    with page_of(browser, cluster.gateway_urls[0]) as (page, _):
        log_in(page, cluster.gateway_urls[0])
        page.get_by_role("link", name="Ask").click()
        page.get_by_label("Prompt", exact=True).fill(fresh("sent"))
        page.get_by_role("button", name="Send").click()
        answer = page.get_by_label("Answer")
        wait_until(lambda: answer.inner_text())
        expect(page.locator("#sent")).to_contain_text("(cold). 0 tokens were expected in its cache.")
        seen = len(answer.inner_text())
        wait_until(lambda: len(answer.inner_text()) > seen)
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#sent")).to_have_text("You stopped it.")
        page.get_by_role("button", name="Explain").click()
        expect(page.locator("#choice")).to_contain_text("It would go to")
        expect(page.locator("#sent")).to_have_text("")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#sent")).to_contain_text("Its engine found", timeout=60_000)
        expect(page.locator("#choice")).to_contain_text("It would go to")  # the explanation of the same prompt stays
        page.get_by_label("Prompt", exact=True).fill(" ")
        other = "document.querySelector('#models').replaceChildren(new Option('nobody serves this'))"
        page.evaluate(f"{other}; document.querySelector('button[value=send]').click()")
        expect(page.locator("#sent")).to_contain_text("model")
        expect(page.locator("#choice")).to_have_text("")  # nothing of an earlier question stays


def test_the_store_and_the_limits_of_tenants_are_shown(browser: Browser, cluster: Cluster) -> None:
    url = cluster.gateway_urls[0]
    with page_of(browser, url) as (page, _):
        log_in(page, url)
        page.get_by_role("link", name="Store").click()
        expect(page.locator("#watched")).to_contain_text("watched by gw")
        expect(page.locator("#figures")).to_contain_text("MiB")
        expect(page.locator("#kinds")).to_contain_text("KVGate's own")
        expect(page.locator("#conditions")).to_contain_text("Nothing is wrong.")
        page.get_by_role("link", name="Queue").click()
        with httpx.Client(base_url=url, headers=bearer("alice"), timeout=30) as http, held(http, 2):
            tenant = page.locator("#tenants tr[data-key=research]")
            expect(tenant).to_contain_text("2 of 40")
            expect(tenant.get_by_role("meter", name="in flight")).to_have_attribute("aria-valuenow", "2")


def test_what_the_doctor_finds_is_told_with_its_fix(browser: Browser, cluster: Cluster, tmp_path: Path) -> None:
    with (
        redis.Redis.from_url(cluster.redis_url) as store,
        running_gateway(tmp_path, cluster.redis_url, cluster.replicas, {}) as url,
        page_of(browser, url) as (page, _),
    ):
        before = store.config_get("maxmemory-policy")["maxmemory-policy"]
        store.config_set("maxmemory-policy", "allkeys-lru")
        page.goto(f"{url}/console")
        expect(page.locator("#findings")).to_contain_text("maxmemory-policy is allkeys-lru")
        expect(page.locator("#findings")).to_contain_text("CONFIG SET maxmemory-policy volatile-lru")
        expect(page.locator("#problems")).to_contain_text("allkeys-lru")
        expect(page.get_by_role("img", name="gateways: 3, Redis, replicas: 3")).to_be_visible()
        store.config_set("maxmemory-policy", before)
        expect(page.locator("#wrong")).to_be_hidden()


def test_a_prefix_that_is_used_appears_with_who_holds_it(browser: Browser, cluster: Cluster) -> None:
    url, text = cluster.gateway_urls[0], fresh("a hot prefix ") * 60
    with page_of(browser, url) as (page, _):
        log_in(page, url)
        for _ in range(3):
            answer = httpx.post(f"{url}/v1/chat/completions", json=chat_body(text), headers=bearer("root"), timeout=20)
        page.get_by_role("link", name="Prefixes").click()
        expect(page.locator("#keys")).to_contain_text(f"{answer.headers['x-kvgate-replica']} (gpu")
        expect(page.locator("#keys")).to_contain_text(re.compile(r"sim · \d+ tokens · \d+ s ago"))
        expect(page.locator("#keys")).not_to_contain_text("a hot prefix")
        page.locator("#order select").select_option("the largest")
        expect(page.locator("#keys tr").first).to_be_visible()


def test_the_cost_of_this_month_is_shown_by_tenant_and_model(browser: Browser, cluster: Cluster) -> None:
    url = cluster.gateway_urls[0]
    ask(url, fresh("billed"), max_tokens=5)
    wait_until(lambda: httpx.get(f"{url}/v1/usage", headers=bearer("root")).json()["totals"]["cost"])
    with page_of(browser, url) as (page, _):
        log_in(page, url)
        page.get_by_role("link", name="Usage").click()
        expect(page.locator("#billed")).to_contain_text(re.compile(r"have cost 0\.\d+ EUR since \d{4}-\d\d began"))
        expect(page.locator("#bills tr").first).to_contain_text(re.compile(r"research.*sim"))
        rows = page.locator("#budgets tr")
        expect(page.locator("#budgeted")).to_have_text("Times are of UTC.")
        expect(rows).to_have_count(2)
        day, month = rows.filter(has_text="EUR"), rows.filter(has_text="tokens")
        assert told(day, "Spent").inner_text().endswith(" of 50.00 EUR")
        assert float(told(day, "Spent").get_by_role("meter").get_attribute("aria-valuenow") or 0) > 0
        assert (told(day, "State").inner_text(), told(month, "State").inner_text()) == (
            "open",
            "soft limit reached (0 %)",
        )
        assert re.fullmatch(r"\d{4}-\d\d-\d\d 00:00", told(month, "Opens again").inner_text())


def test_a_button_drains_a_replica_and_the_page_of_another_gateway_ends_that(
    browser: Browser, cluster: Cluster
) -> None:
    url, other = cluster.gateway_urls
    name = cluster.replicas[0].id
    with page_of(browser, url) as (page, _), page_of(browser, other) as (page_of_other, _):
        log_in(page, url)
        log_in(page_of_other, other)
        page.get_by_role("button", name=f"Drain {name}").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
        expect(page.get_by_role("dialog")).to_be_hidden()
        seen = page.locator("#since").inner_text()
        expect(page.locator("#since")).not_to_have_text(seen)  # the rows were drawn anew since
        expect(page.get_by_role("button", name=f"Drain {name}")).to_be_focused()
        page.keyboard.press("Enter")
        page.get_by_role("dialog", name=f"Drain {name}?").get_by_role("button", name="Drain").click()
        expect(page.locator("#acted")).to_have_text(f"{name} gets no new requests.")
        row = page_of_other.locator(f"#replicas tr[data-key={name}]")
        expect(row).to_contain_text("drained")
        expect(page_of_other.locator("#health")).to_contain_text(f"replica {name}: it is drained")
        expect(page_of_other.locator("#status")).to_have_class("status warn")
        page.get_by_role("link", name="Queue").click()
        expect(page.locator("#rooms tr", has_text=name)).to_contain_text("no: drained")
        page_of_other.get_by_role("button", name=f"Serve again: {name}").click()
        expect(row).to_contain_text("ready")
        expect(page.locator("#rooms tr", has_text=name)).to_contain_text("yes")


def test_a_killed_replica_is_shown_within_seconds(browser: Browser, cluster: Cluster) -> None:
    url = cluster.gateway_urls[0]
    with page_of(browser, url) as (page, _):
        log_in(page, url)
        expect(page.locator("#totals")).to_contain_text("3 of 3 replicas ready")
        expect(page.locator("#wrong")).to_be_hidden()
        victim = cluster.replicas[1]
        victim.kill()
        wait_until(lambda: f"replica {victim.id}" in page.locator("#problems").inner_text(), within_s=SHOWN_WITHIN_S)
        expect(page.locator("#health")).to_contain_text(f"replica {victim.id}: ")
        expect(page.locator("#status")).to_have_class("status bad")
        expect(page.locator("#totals")).to_contain_text("2 of 3 replicas ready")
        expect(page.locator(f"#replicas tr[data-key={victim.id}] td.bad")).to_be_visible()
        expect(page.locator(f"#replicas tr[data-key={victim.id}]")).to_contain_text("nothing to tell")


def test_a_gateway_that_died_is_named_until_it_is_back(browser: Browser, cluster: Cluster) -> None:
    died, url = cluster.gateway_processes[1], cluster.gateway_urls[0]
    with page_of(browser, url) as (page, _):
        log_in(page, url)
        died.kill()
        expect(page.locator("#problems")).to_contain_text("gateway gw1: its lease ran out at")
        expect(page.locator("#picture circle.bad", has_text="gateway gw1")).to_have_count(1)
        died.start()
        expect(page.locator("#problems")).not_to_contain_text("gw1")
        died.stop()
        expect(page.get_by_role("img", name="gateways: 1, Redis, replicas: 3")).to_be_visible()
        expect(page.locator("#problems")).not_to_contain_text("gw1")  # it ended as it should


def test_while_redis_is_away_nothing_is_told_as_if_it_were_of_now(
    browser: Browser, cluster: Cluster, tmp_path: Path
) -> None:
    url = cluster.gateway_urls[0]
    with page_of(browser, url) as (page, _), redis.Redis.from_url(cluster.redis_url) as store:
        log_in(page, url, "store")
        expect(page.locator("#conditions")).to_contain_text("Nothing is wrong.")
        pid = store.info("server")["process_id"]
        os.kill(pid, signal.SIGSTOP)
        try:
            expect(page.locator("#stale")).to_contain_text("What is shown is of")
            expect(page.locator("#conditions")).to_contain_text("Not known.")
            page.get_by_role("link", name="Queue").click()
            expect(page.locator("#waiting")).to_contain_text("Not known.")
            expect(page.locator("#rooms")).not_to_contain_text("yes")
            page.get_by_role("link", name="Overview").click()
            expect(page.locator("#picture circle.quiet", has_text="agent of")).to_have_count(3)
            with (
                running_gateway(tmp_path, cluster.redis_url, cluster.replicas, {}, wait=False) as late,
                page_of(browser, late) as (page_opened_late, _),
            ):
                page_opened_late.goto(f"{late}/console")
                shown = page_opened_late.get_by_role("img", name="gateways: 1, Redis does not answer, replicas: 3")
                expect(shown).to_be_visible()
                expect(page_opened_late.locator("#stale")).to_contain_text("Only what this gateway knows")
        finally:
            os.kill(pid, signal.SIGCONT)
        expect(page.locator("#stale")).to_be_hidden()
