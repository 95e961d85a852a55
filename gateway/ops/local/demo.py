"""The first two requests of a new cluster: one of text, one with an image, each sent to two gateways.

The second gateway matches what the first one wrote to the store; nothing else connects the two.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import httpx
from PIL import Image

from coordinator.engine.sockets import tls_context
from gateway.ops.local.state_dir import Cluster

_TIMEOUT_S = 60.0
_MAX_TOKENS = 24
_CONTEXT = (
    "KVGate puts several stateless gateways in front of a fleet of vLLM replicas. They share, in one Redis, which "
    "replica holds which prompt prefix in its KV cache and how busy each replica is, so that any gateway sends a "
    "prompt to the replica that has already computed most of it. "
)
_QUESTION = "In one sentence: why do the gateways need no memory of their own?"


@dataclass(frozen=True)
class DemoRequest:
    """One request of the demo and its answer, or the `problem` that it met."""

    what: str
    gateway: str
    answer: str = ""
    replica: str = ""
    matched_tokens: str = ""
    decision: str = ""
    problem: str | None = None


def client(key: str | None) -> httpx.AsyncClient:
    """A client of the gateways, with an API key if they ask for one."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, verify=tls_context(), headers=headers)


async def send_requests(cluster: Cluster, model: str, key: str | None) -> AsyncIterator[DemoRequest]:
    """Send each request through the first gateway and again through the last one."""
    async with client(key) as http:
        question = [picture(Image.linear_gradient("L")), {"type": "text", "text": "What does this picture show?"}]
        prompts: dict[str, list[dict[str, Any]]] = {
            "text": [{"role": "system", "content": _CONTEXT * 4}, {"role": "user", "content": _QUESTION}],
            "image": [{"role": "user", "content": question}],
        }
        for what, messages in prompts.items():
            body = {"model": model, "max_tokens": _MAX_TOKENS, "messages": messages}
            for gateway in (cluster.gateways[0], cluster.gateways[-1]):
                yield await _send(http, what, gateway.id, gateway.url, body)


async def _send(http: httpx.AsyncClient, what: str, gateway: str, url: str, body: dict[str, Any]) -> DemoRequest:
    try:
        response = await http.post(f"{url}/v1/chat/completions", json=body)
        if response.status_code != 200:
            return DemoRequest(what, gateway, problem=f"{response.status_code}: {response.text[:200]}")
        answer = response.json()["choices"][0]["message"]["content"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        return DemoRequest(what, gateway, problem=f"no usable answer ({error or type(error).__name__})")
    headers = (response.headers.get(f"x-kvgate-{name}", "") for name in ("replica", "matched-tokens", "decision"))
    return DemoRequest(what, gateway, str(answer).strip(), *headers)


class KeyWantedError(Exception):
    """The gateways ask for API keys, and the demo has none of them."""


async def first_model(url: str, key: str | None, *, is_gateway: bool = True) -> str | None:
    """The first model that the gateways (or a replica) at `url` list; None if they list none. Raises KeyWantedError if
    gateways want another key."""
    try:
        async with client(key) as http:
            answer = await http.get(f"{url}/v1/models")
        if answer.status_code == 401 and is_gateway:
            raise KeyWantedError
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return None


def picture(image: Image.Image) -> dict[str, Any]:
    """The part of a message that has this image."""
    file = BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}
