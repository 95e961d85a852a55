"""Starts a gateway to attack, with its own Redis, in front of three replicas that lie on request."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx

from bench.attacks import images
from bench.attacks.documents import messages
from bench.attacks.target import Target, chat
from bench.cluster import running_gateways
from bench.server_process import running_servers
from gateway.settings.gateway_settings import GatewaySettings

_CHAT = "/v1/chat/completions"
_JSON = {"content-type": "application/json"}
_FORM = (
    b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\ncanned\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n--b--\r\n'
)
Settings = dict[str, dict[str, Any]]


def lying_replicas() -> AbstractContextManager[list[str]]:
    """Starts the replicas. Gives their URLs."""
    return running_servers("bench.attacks.replicas", 3)


def known(wanted: Mapping[str, Mapping[str, Any]]) -> Settings:
    """Keeps only the settings that the gateway under test has."""
    found: Settings = {}
    for section, fields in wanted.items():
        described = GatewaySettings.model_fields.get(section)
        has = getattr(described.annotation, "model_fields", {}) if described is not None else {}
        if kept := {name: value for name, value in fields.items() if name in has}:
            found[section] = kept
    return found


class Arena:
    """Keeps the replicas for the whole run. Keeps a gateway until an attack harms it or needs other settings."""

    def __init__(self, replicas: list[str]) -> None:
        self._replicas = replicas
        self._gateway = ExitStack()
        self._settings: Settings | None = None
        self._target: Target | None = None

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def discard(self) -> None:
        """Ends this gateway. The next attack gets a fresh one."""
        self._target = None
        self._gateway.close()

    def target(self, settings: Mapping[str, Mapping[str, Any]]) -> Target:
        """Returns a warmed-up gateway with these settings, as far as it knows them. Raises RuntimeError or
        httpx.HTTPError if it does not start."""
        wanted = known(settings)
        if self._target is None or wanted != self._settings:
            self.discard()
            self._target, self._settings = self._start(wanted), wanted
        return self._target

    def _start(self, settings: Settings) -> Target:
        urls = {f"r{index}": url for index, url in enumerate(self._replicas)}
        cluster = self._gateway.enter_context(running_gateways(urls, gateways=1, config=settings))
        (gateway,), url = cluster.gateway_processes, cluster.gateway_urls[0]
        _warm_up(url)
        at = urlsplit(url)
        return Target(at.hostname or "", at.port or 80, gateway.pid, gateway.log, self._replicas[0])


def _warm_up(url: str) -> None:
    """Sends one request of each kind, so that caches and worker processes exist before an attack."""
    with httpx.Client(base_url=url, timeout=30) as client:
        for body in [chat()] * 50 + [chat(stream=True)] * 10:
            client.post(_CHAT, content=body, headers=_JSON).raise_for_status()
        for body in (messages(1_500_000), images.chat_with("png", [images.png(1)])):
            client.post(_CHAT, content=body, headers=_JSON)
        with ThreadPoolExecutor() as together:  # one request for each worker process
            large = chat(b"word " * 500_000)
            list(together.map(lambda _: client.post(_CHAT, content=large, headers=_JSON), range(4)))
        client.post(
            "/v1/audio/transcriptions", content=_FORM, headers={"content-type": "multipart/form-data; boundary=b"}
        )
        client.get("/metrics")
