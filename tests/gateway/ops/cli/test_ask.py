"""Commands ask a server that is no gateway, or a balancer whose gateways are away."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from gateway.ops.cli.ask import NoAnswer, ask
from gateway.ops.cli.watch import watched
from gateway.ops.errors import CommandError
from tests.threaded_server import SilentHandler, in_thread


class Fake(SilentHandler):
    """Answers a path like /200/{"a":1}."""

    def do_GET(self) -> None:
        _, status, body = self.path.split("/", 2)
        self.send_response(int(status))
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


@pytest.fixture
def url() -> Iterator[str]:
    with in_thread(ThreadingHTTPServer(("127.0.0.1", 0), Fake)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize("answer", ["200/{}", "200/[]", "200/null", "200/text", '404/{"detail":"NotFound"}'])
def test_what_is_no_gateway_is_told_to_be_none(url: str, answer: str) -> None:
    with pytest.raises(CommandError, match="not like a gateway; give the address of one") as caught:
        ask("GET", f"{url}/{answer}", None, "pools")
    assert not isinstance(caught.value, NoAnswer)
    with pytest.raises(CommandError, match="like a gateway"):
        next(watched(f"{url}/{answer}", None))


@pytest.mark.parametrize("answer", ["502/<html>", '503/{"message":"away"}'])
def test_a_balancer_without_gateways_may_have_some_later(url: str, answer: str) -> None:
    with pytest.raises(NoAnswer, match="answered 50"):
        ask("GET", f"{url}/{answer}", None, "pools")
    event, words = next(watched(f"{url}/{answer}", None))
    assert event == "trouble"
    assert words.endswith("trying again")
