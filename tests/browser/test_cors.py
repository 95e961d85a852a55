"""A web page of another origin, in a real browser, asks a gateway and reads the answer as it comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from playwright.sync_api import expect, sync_playwright

from bench.cluster import running_cluster
from gateway.ops.local.ports import free_ports
from tests.api.stage import api_key, bearer, chat_body, fresh, running_gateway
from tests.documents import example, typing
from tests.programs import CHROMIUM, needs
from tests.threaded_server import SilentHandler, in_thread

pytestmark = needs("chromium")

SECURITY: dict[str, Any] = {
    "api_keys": [api_key("root", "operations", admin=True)],
    "cache_salt_secret": "canary-cache-salt-secret",
}
ASK = """async ([url, headers, body]) => {
  try {
    const answer = await fetch(url, {method: "POST", headers, body});
    const pieces = answer.body.pipeThrough(new TextDecoderStream());
    let text = "";
    for await (const piece of pieces) text += piece;
    return {status: answer.status, id: answer.headers.get("x-request-id"),
            replica: answer.headers.get("x-kvgate-replica"), text};
  } catch (error) { return {error: String(error)}; }
}"""


class Blank(SilentHandler):
    """An empty page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()


@contextmanager
def page_server() -> Iterator[str]:
    with in_thread(ThreadingHTTPServer(("127.0.0.1", 0), Blank)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def test_a_page_of_an_allowed_origin_asks_and_reads_headers_and_stream(tmp_path: Path) -> None:
    headers = {"content-type": "application/json", "x-request-id": "of-a-page", **bearer("root")}
    body = json.dumps(chat_body(fresh(), stream=True))
    with (
        page_server() as allowed,
        page_server() as other,
        running_cluster(gateways=2, replicas=3, replica_arguments=("--speed", "0"), config={}) as cluster,
        running_gateway(
            tmp_path,
            cluster.redis_url,
            cluster.replicas,
            {"security": {**SECURITY, "allow_origins": [allowed]}},
        ) as url,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(allowed)
        answer = page.evaluate(ASK, [f"{url}/v1/chat/completions", headers, body])
        assert (answer["status"], answer["id"]) == (200, "of-a-page")
        assert answer["replica"] in {replica.id for replica in cluster.replicas}
        assert answer["text"].endswith("data: [DONE]\n\n")
        unknown = {**headers, "authorization": "Bearer nobody"}
        assert page.evaluate(ASK, [f"{url}/v1/chat/completions", unknown, body])["status"] == 401
        page.goto(other)
        refused = page.evaluate(ASK, [f"{url}/v1/chat/completions", headers, body])
        assert refused == {"error": "TypeError: Failed to fetch"}
        browser.close()


def test_the_page_of_the_document_shows_an_answer(tmp_path: Path) -> None:
    gateways, page_port = map(str, free_ports(2))
    *typed, kill, down = example("how-to/browsers.md", "An example", {"8080": gateways, "5173": page_port})
    with typing(tmp_path, typed, [kill, down]), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{page_port}")
        page.get_by_role("button").click()
        expect(page.locator("pre")).to_contain_text("data: [DONE]", timeout=20_000)
        expect(page.locator("output")).not_to_be_empty()
        browser.close()
