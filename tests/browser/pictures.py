"""Takes the pictures of docs/console.md and docs/tour.md, in five minutes: `python -m tests.browser.pictures`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from bench.cluster import running_cluster
from gateway.ops.local.state_dir import read_cluster
from tests.api.stage import api_key, bearer
from tests.browser import gentle_load
from tests.browser.test_console import held, log_in
from tests.polling import wait_until
from tests.programs import CHROMIUM

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
_WIDTH, _HEIGHT = 1180, 860
_WIDE, _PHONE = 1680, 390
_LOAD_S = 200
_NUMBERS = " ".join(map(str, range(1, 601)))
_WITH_TENANTS: dict[str, Any] = {
    "policy": {"max_active_requests": 2},
    "tenants": [
        {"name": "dialogs", "priority": "realtime", "limits": {"concurrency": 8, "requests_per_min": 600}},
        {"name": "reports", "priority": "batch", "weight": 2, "limits": {"tokens_per_min": 200_000}},
    ],
    "security": {
        "api_keys": [api_key("alice", "dialogs"), api_key("bob", "reports"), api_key("root", "operations", admin=True)],
        "cache_salt_secret": "secret-of-the-pictures",
    },
}


@contextmanager
def page(browser: Browser, scheme: str, width: int = _WIDTH) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": width, "height": _HEIGHT}, color_scheme=scheme)  # type: ignore[arg-type]
    yield context.new_page()
    context.close()


def take(page: Page, name: str, lowest: int | None = None) -> None:
    """A picture of the page: of all of it, or down to `lowest`. Its colours are few, so a palette keeps it small."""
    clip = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": lowest} if lowest else None  # type: ignore[index]
    taken = page.screenshot(full_page=True, clip=clip)  # type: ignore[arg-type]
    save(taken, name)


def save(taken: bytes, name: str) -> None:
    small = Image.open(BytesIO(taken)).convert("RGB").quantize(255, Image.Quantize.MAXCOVERAGE)
    small.save(FOLDER / f"{name}.png", optimize=True)


def show(page: Page, url: str, view: str, until: str) -> None:
    """Opens a view, and waits until a place in it has something."""
    page.goto(f"{url}/console#{view}")
    wait_until(lambda: page.locator(until).first.is_visible())


def ask(url: str, request_id: str, question: str) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": f"{_NUMBERS} {question}"}]}
    httpx.post(f"{url}/v1/chat/completions", json=body, headers={"x-request-id": request_id}, timeout=60)


def explain(page: Page, question: str) -> None:
    page.get_by_label("Prompt", exact=True).fill(f"{_NUMBERS} {question}")
    page.get_by_role("button", name="Explain").click()
    wait_until(lambda: "It would go to" in page.locator("#choice").inner_text())


def with_load(browser: Browser) -> None:
    with running_cluster(gateways=2, replicas=2, replica_arguments=("--speed", "1")) as cluster:
        described = read_cluster(cluster.state_dir)
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        load = asyncio.run_coroutine_threadsafe(gentle_load.run(described, "sim"), loop)
        url = cluster.gateway_urls[0]
        with (
            page(browser, "light") as light,
            page(browser, "dark") as dark,
            page(browser, "light", _WIDE) as wide,
            page(browser, "dark", _PHONE) as phone,
        ):
            looks = {"light": light, "dark": dark, "wide": wide, "phone": phone}
            for look in looks.values():
                show(look, url, "overview", "#replicas tr[data-key]")
            threading.Event().wait(_LOAD_S)  # so that the curves have something
            for name, look in looks.items():
                take(look, f"console-overview-{name}", 1300 if name == "phone" else None)
            show(phone, url, "decisions", "#records tr[data-request]")
            take(phone, "console-decisions-phone", _HEIGHT)
            show(light, url, "decisions", "#records tr[data-request]")
            threading.Event().wait(20)
            take(light, "console-decisions-light", _HEIGHT)
            show(dark, url, "prefixes", "#keys td.number")
            threading.Event().wait(10)
            take(dark, "console-prefixes-dark", _HEIGHT)
            show(dark, url, "store", "#figures .card")
            take(dark, "console-store-dark")
            tour(light, cluster.gateway_urls)
        load.cancel()
        threading.Event().wait(1)
        loop.call_soon_threadsafe(loop.stop)


def tour(page: Page, urls: list[str]) -> None:
    show(page, urls[0], "decisions", "#records tr[data-request]")
    page.get_by_label("Request id").fill("tour")
    ask(urls[0], "tour-1", "What comes next?")
    ask(urls[1], "tour-2", "Add them up.")
    wait_until(lambda: page.locator("#records tr[data-request]").count() == 2)
    take(page, "tour-decisions", 390)
    page.locator("#records tr[data-request]").first.click()
    save(page.get_by_role("dialog").screenshot(), "tour-record")
    page.get_by_role("button", name="Close").click()
    show(page, urls[0], "ask", "#models")
    explain(page, "Which are odd?")
    take(page, "tour-ask")
    page.get_by_role("button", name="Send").click()
    wait_until(lambda: "Its engine found" in page.locator("#sent").inner_text())
    take(page, "console-ask-light")


def with_a_queue(browser: Browser) -> None:
    with (
        running_cluster(gateways=2, replicas=2, replica_arguments=("--speed", "1"), config=_WITH_TENANTS) as cluster,
        page(browser, "dark") as dark,
    ):
        url = cluster.gateway_urls[0]
        log_in(dark, url, "queue")
        with (
            httpx.Client(base_url=url, headers=bearer("alice"), timeout=60) as dialogs,
            httpx.Client(base_url=url, headers=bearer("bob"), timeout=60) as reports,
            held(reports, 6),
            held(dialogs, 3),
        ):
            wait_until(lambda: dark.locator("#waiting tr").count() == 2)
            take(dark, "console-queue-dark", 640)


def main() -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        with_a_queue(browser)
        with_load(browser)
        browser.close()


if __name__ == "__main__":
    main()
