"""Asking gateways, and LMCache's servers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx

from gateway.ops.doctor.evidence import GatewayEvidence, LmcacheEvidence, Unknown

_PROMPT = "The doctor asks which keys this prompt has. " * 40
_FORBIDDEN = (401, 403)


class NotAnswered(Exception):
    """What was asked was not answered as it should have been."""


async def ask_gateway(http: httpx.AsyncClient, url: str, timeout_s: float) -> GatewayEvidence:
    """What it says of itself."""
    try:
        (_, ready), (_, about) = await asyncio.gather(
            *(_json(http, "GET", f"{url}{path}", timeout_s) for path in ("/ready", "/version"))
        )
        return GatewayEvidence(
            url=url,
            id=str(ready["gateway"]),
            version=str(about["version"]),
            settings={str(section): str(digest) for section, digest in about.get("settings", {}).items()},
            is_ready=bool(ready["ready"]),
            reasons=tuple(map(str, ready["reasons"])),
            store_problem=str(ready.get("store_problem") or ""),
            store_warnings=_warnings(ready),
            taken_ids={str(replica): str(said) for replica, said in ready.get("taken_ids", {}).items()},
            replicas=frozenset(map(str, ready["replicas"])),
            exact=frozenset(map(str, ready["exact"])),
            pools=tuple(map(str, ready.get("pools", ()))),
        )
    except NotAnswered as error:
        return GatewayEvidence(url=url, problem=str(error))
    except (LookupError, TypeError, AttributeError):
        return GatewayEvidence(url=url, problem=f"{url}/ready answers, and not as a gateway does")


def _warnings(ready: dict[str, Any]) -> dict[str, str]:
    """By condition; an older gateway names none."""
    warnings = tuple(map(str, ready.get("store_warnings", ())))
    conditions = tuple(map(str, ready.get("store_conditions", warnings)))
    return dict(zip(conditions, warnings, strict=False))


async def with_keys(
    http: httpx.AsyncClient,
    gateways: tuple[GatewayEvidence, ...],
    model: str | None,
    api_key: str | None,
    timeout_s: float,
) -> tuple[GatewayEvidence, ...]:
    """The gateways, each with the keys that it gives one prompt for `model`."""

    async def ask(gateway: GatewayEvidence) -> GatewayEvidence:
        if gateway.problem:
            return gateway
        keys = Unknown("no replica says which models it serves") if model is None else await explain(gateway.url)
        return replace(gateway, keys=keys)

    async def explain(url: str) -> tuple[str, ...] | Unknown:
        body = {"model": model, "messages": [{"role": "user", "content": _PROMPT}]}
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            status, answer = await _json(http, "POST", f"{url}/v1/route/explain", timeout_s, json=body, headers=headers)
            if status in _FORBIDDEN:
                return Unknown("it shows its decisions to admins only: give an admin's key as KVGATE_API_KEY")
            return tuple(str(key["key"]) for key in answer["chain"])
        except NotAnswered as error:
            return Unknown(str(error))
        except (LookupError, TypeError):
            return Unknown(f"/v1/route/explain answered {status} for model {model}")

    return tuple(await asyncio.gather(*map(ask, gateways)))


async def ask_lmcache(http: httpx.AsyncClient, url: str, timeout_s: float) -> LmcacheEvidence:
    """What an LMCache server says of its chunks."""
    try:
        status, said = await _json(http, "GET", f"{url}/status", timeout_s)
        if said.get("is_healthy") is not True:
            return LmcacheEvidence(url, f"/status answered {status} and does not say that it is healthy")
        return LmcacheEvidence(url, "", str(said["chunk_size"]), str(said["hash_algorithm"]))
    except NotAnswered as error:
        return LmcacheEvidence(url, str(error))
    except (LookupError, AttributeError):
        return LmcacheEvidence(url, "/status is not what `lmcache server` answers")


async def _json(http: httpx.AsyncClient, method: str, url: str, timeout_s: float, **content: Any) -> tuple[int, Any]:
    try:
        async with asyncio.timeout(timeout_s):
            response = await http.request(method, url, **content)
            return response.status_code, response.json()
    except TimeoutError:
        raise NotAnswered(f"{url} does not answer within {timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NotAnswered(f"no answer from {url} ({error or type(error).__name__})") from None
    except ValueError:
        raise NotAnswered(f"{url} answered {response.status_code}, and no JSON") from None
