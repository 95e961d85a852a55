"""Objects that one replica makes and keeps: videos, files, batches, voices. Each request that names one goes there,
through any gateway. The replicas are three servers that know only the objects that they made."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.cluster import Cluster, SimReplica
from tests.api.conftest import GUARDED
from tests.api.stage import Stage, bearer, error_of, running_gateway
from tests.polling import wait_until
from tests.threaded_server import SilentHandler, in_thread

CONTENT = bytes(range(256)) * 16
REPLICAS = ("keeper0", "keeper1", "keeper2")
"""Not the ids of other replicas in the same Redis: two engines with one id take it from each other."""


class _Maker(SilentHandler):
    """Serves the models `m` and `n`. A POST to a list makes an object; what it does not know is a 404."""

    protocol_version = "HTTP/1.1"
    numbers = count()
    made: set[str]
    id: str

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        document = json.loads(body) if body.startswith(b"{") else {}
        if self.path == "/v1/audio/voices":
            self.made.add(document["name"])
            self._json(200, {"success": True, "voice": {"name": document["name"]}, "by": self.id})
        elif self.path in ("/v1/videos", "/v1/files", "/v1/batches"):
            made = f"{self.path[4:-1]}_{next(self.numbers)}"
            self.made.add(made)
            self._json(200, {"id": made, "status": "queued", "by": self.id})
        else:
            self._json(200, {"by": self.id})

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json(200, {"object": "list", "data": [{"id": name, "object": "model", "root": "m"} for name in "nm"]})
            return
        name = self.path.split("?")[0].removesuffix("/content").split("/")[-1]
        if name not in self.made:
            self._json(404, {"error": {"message": "unknown here"}})
        elif self.path.endswith("/content"):
            self._content()
        else:
            self._json(200, {"id": name, "by": self.id})

    do_HEAD = do_DELETE = do_GET

    def _content(self) -> None:
        asked = self.headers.get("range", "").removeprefix("bytes=")
        first, last = map(int, asked.split("-")) if asked else (0, len(CONTENT) - 1)
        part = CONTENT[first : last + 1]
        self.send_response(206 if asked else 200)
        self.send_header("content-type", "video/mp4")
        self.send_header("content-length", str(len(part)))
        if asked:
            self.send_header("content-range", f"bytes {first}-{last}/{len(CONTENT)}")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(part)

    def _json(self, status: int, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def makers() -> Iterator[list[SimReplica]]:
    with ExitStack() as stack:
        replicas = []
        for name in REPLICAS:
            handler = type("Maker", (_Maker,), {"made": set(), "id": name})
            server = stack.enter_context(in_thread(ThreadingHTTPServer(("127.0.0.1", 0), handler)))
            replicas.append(SimReplica(name, server.server_address[1], (), None))  # type: ignore[arg-type]
        yield replicas


@pytest.fixture(scope="module")
def stage(
    makers: list[SimReplica],
    open_cluster: Cluster,
    http: httpx.Client,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    """Two gateways with keys. Requests use alice's key unless a test gives another."""
    config = {"security": GUARDED["security"]}
    with ExitStack() as stack:
        folders = [tmp_path_factory.mktemp("makers") for _ in range(2)]
        gateways = [running_gateway(folder, open_cluster.redis_url, makers, config) for folder in folders]
        yield Stage([stack.enter_context(one) for one in gateways], makers, http, headers=bearer("alice"))


@pytest.mark.parametrize("kind", ["videos", "files", "batches"])
def test_a_job_is_asked_of_the_replica_that_made_it_through_any_gateway(stage: Stage, kind: str) -> None:
    for number in range(6):
        made = stage.post(f"/v1/{kind}", {"model": "m", "prompt": "a cat"}, gateway=number % 2).json()
        for gateway in (0, 1):
            assert stage.get(f"/v1/{kind}/{made['id']}", gateway=gateway).json()["by"] == made["by"]


def test_what_a_body_names_decides_as_well(stage: Stage) -> None:
    for number in range(6):
        file = stage.post("/v1/files", {"model": "m"}, gateway=number % 2).json()
        batch = {"model": "m", "input_file_id": file["id"]}
        assert stage.post("/v1/batches", batch, gateway=1).json()["by"] == file["by"]
        voice = {"model": "m", "name": f"voice-{number}"}
        kept_by = stage.post("/v1/audio/voices", voice, headers=bearer("root")).json()["by"]
        speech = {"model": "m", "input": "x", "voice": voice["name"]}
        assert stage.post("/v1/audio/speech", speech, gateway=1).json()["by"] == kept_by
        assert stage.get(f"/v1/audio/voices/{voice['name']}", gateway=1).json()["by"] == kept_by
    assert stage.post("/v1/audio/speech", {"model": "m", "input": "x", "voice": "built in"}).is_success


def test_another_tenants_object_is_unknown(stage: Stage) -> None:
    made = stage.post("/v1/videos", {"model": "m"}).json()["id"]
    refused = stage.get(f"/v1/videos/{made}", headers=bearer("bob"))
    assert (refused.status_code, error_of(refused)["code"]) == (404, "video_not_found")
    assert stage.get(f"/v1/videos/{made}", headers=bearer("anna")).is_success, "of the same tenant"
    unknown = stage.get("/v1/videos/of_yesterday?model=m")
    assert (unknown.status_code, error_of(unknown)["code"]) == (404, "video_not_found"), "it may be another tenant's"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/files"), ("HEAD", "/v1/videos"), ("POST", "/v1/audio/voices"), ("DELETE", "/v1/audio/voices/a")],
)
def test_what_concerns_all_tenants_needs_an_admin(stage: Stage, method: str, path: str) -> None:
    body = {"model": "m", "name": "a"} if method == "POST" else None
    assert stage.send(method, path, json=body).status_code == 403
    assert stage.send(method, path, json=body, headers=bearer("root")).status_code != 403


def test_an_object_that_no_gateway_saw_made_is_asked_for_by_load(stage: Stage) -> None:
    for path in ("/v1/videos/of_yesterday?model=m", "/v1/videos/of_yesterday"):
        answer = stage.get(path, headers=bearer("root"))
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, "unknown here")


def test_without_the_store_a_voice_of_the_engine_is_heard(stage: Stage, tmp_path: Path) -> None:
    with running_gateway(tmp_path, "redis://127.0.0.1:1", stage.sims, {}, wait=False) as url:
        speech = {"model": "m", "input": "x", "voice": "alloy"}
        wait_until(lambda: stage.http.post(f"{url}/v1/audio/speech", json=speech).is_success)
        lost = stage.http.get(f"{url}/v1/videos/any", params={"model": "m"})
        assert (lost.status_code, error_of(lost)["code"]) == (409, "video_unreachable")


def test_without_the_store_nobody_gets_what_may_be_another_tenants(stage: Stage, tmp_path: Path) -> None:
    config = {"security": GUARDED["security"]}
    with running_gateway(tmp_path, "redis://127.0.0.1:1", stage.sims[:1], config, wait=False) as url:
        wait_until(lambda: stage.http.get(f"{url}/v1/models", headers=bearer("bob")).json()["data"])
        refused = stage.http.get(f"{url}/v1/videos/any", params={"model": "m"}, headers=bearer("bob"))
        assert (refused.status_code, error_of(refused)["code"]) == (409, "video_unreachable")
        asked = stage.http.get(f"{url}/v1/videos/any", params={"model": "m"}, headers=bearer("root"))
        assert asked.json()["error"]["message"] == "unknown here", "the only replica was asked for an admin"


def test_a_file_comes_in_parts_and_its_length_is_told_before(stage: Stage) -> None:
    made = stage.post("/v1/videos", {"model": "m"}).json()["id"]
    part = stage.get(f"/v1/videos/{made}/content", headers={**stage.headers, "range": "bytes=10-99"})
    assert (part.status_code, part.content) == (206, CONTENT[10:100])
    assert part.headers["content-range"] == f"bytes 10-99/{len(CONTENT)}"
    told = stage.send("HEAD", f"/v1/videos/{made}/content")
    assert (told.status_code, told.headers["content-length"], told.content) == (200, str(len(CONTENT)), b"")


def test_the_engines_order_of_models_is_kept(stage: Stage) -> None:
    assert [card["id"] for card in stage.get("/v1/models").json()["data"]] == ["n", "m"]
