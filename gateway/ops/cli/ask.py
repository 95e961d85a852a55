"""Requests of commands to a gateway's own paths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.ops.errors import CommandError, base_url

if TYPE_CHECKING:
    import httpx

_TIMEOUT_S = 10.0
_AS_COMMANDS = {"GET /v1/keys": "kvgate keys list", "GET /v1/replicas": "kvgate replicas list"}
"""What gateways advise to users of HTTP, and the commands that do the same."""


class NoAnswer(CommandError):
    """The gateway cannot be reached, or cannot answer now."""


class NotFound(CommandError):
    """The gateway has answered that it does not have this."""


def gateway_url(gateway: str | None, state_dir: Path) -> str:
    """The gateway to ask: the one that was named, else one of the cluster in the state directory."""
    if gateway:
        return base_url("--gateway", gateway)
    from gateway.ops.local.state_dir import read_cluster

    return read_cluster(state_dir).url


def ask(method: str, url: str, api_key: str | None, has: str, body: bytes | None = None) -> dict[str, Any]:
    """A gateway's JSON answer, which has this field. Raises CommandError for any other; NoAnswer if a later one
    may be better."""
    response = _answer(method, url, api_key, body)
    document = document_of(response)
    if has not in document:
        raise CommandError(_not_like_a_gateway(response))
    return document


def ask_text(url: str, api_key: str | None, content_type: str) -> str:
    """A gateway's answer of this type. Raises CommandError for any other; NoAnswer if a later one may be better."""
    response = _answer("GET", url, api_key, None)
    if response.status_code == 200 and response.headers.get("content-type", "").startswith(content_type):
        return response.text
    document_of(response)
    raise CommandError(_not_like_a_gateway(response))


def _answer(method: str, url: str, api_key: str | None, body: bytes | None) -> httpx.Response:
    import httpx

    from coordinator.engine.sockets import tls_context

    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    try:
        return httpx.request(
            method, url, content=body, headers=headers, timeout=_TIMEOUT_S, trust_env=False, verify=tls_context()
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoAnswer(no_answer(url, error)) from None


def no_answer(url: str, error: Exception) -> str:
    """Why there is no answer, and what to look at."""
    why = str(error).rstrip(".") or type(error).__name__
    look = "is the cluster up?"
    if "CERTIFICATE_VERIFY" in why:
        look = "name its authority in SSL_CERT_FILE"
    elif "disconnected" in why and url.startswith("http:"):
        look = "does it want https?"
    return f"no answer from {url}: {why}; {look}"


def _not_like_a_gateway(response: httpx.Response) -> str:
    url = response.url.copy_with(query=None)
    return f"{url} answered {response.status_code}, but not like a gateway; give the address of one"


def document_of(response: httpx.Response) -> dict[str, Any]:
    """The JSON of a gateway's answer. Raises CommandError for any other; NoAnswer if a later one may be better."""
    status = response.status_code
    try:
        document: dict[str, Any] = response.json()
        message = "" if status == 200 else str(document["error"]["message"])
        is_object = isinstance(document, dict)
    except (ValueError, LookupError, TypeError):
        is_object = False
    if not is_object:
        if status >= 500:  # a balancer's: a later answer may come from a gateway
            raise NoAnswer(f"{response.url.copy_with(query=None)} answered {status}")
        raise CommandError(_not_like_a_gateway(response))
    if status != 200:
        for path, command in _AS_COMMANDS.items():
            message = message.replace(path, command)
        key = {401: "a key", 403: "an admin key"}.get(status)
        fix = f" Give {key} by --api-key or KVGATE_API_KEY." if key else ""
        kind = NoAnswer if status >= 500 else NotFound if status == 404 else CommandError
        raise kind(f"the gateway refused ({status}): {message}{fix}")
    return document
