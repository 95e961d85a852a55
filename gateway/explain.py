"""POST /v1/route/explain: what would be decided for a request, and every number behind it; nothing is placed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson

from coordinator.errors import StoreError
from coordinator.inspect import read_owners
from gateway.admission import Caller
from gateway.fleet import Fleet
from gateway.job import Job, parse_document, resolve_model
from gateway.prompt import Prompt
from gateway.reader import Reader
from gateway.routing.router import Router

_SCORE_FIELDS = ("queries", "data_1", "text_1")

Pin = Callable[[Job], Awaitable[None]]


def api_path(document: Mapping[str, Any], path: str | None) -> str:
    """The API a bare request body belongs to: as said, else by its fields."""
    if path:
        return path
    if "messages" in document:
        return "/v1/messages" if "system" in document else "/v1/chat/completions"
    if "query" in document:
        return "/v1/rerank"
    if not document.keys().isdisjoint(_SCORE_FIELDS):
        return "/v1/score"
    if "input" in document:
        return "/v1/embeddings" if _is_plain_input(document["input"]) else "/v1/responses"
    return "/v1/completions"


def _is_plain_input(value: Any) -> bool:
    """A list of texts or token ids: items of a response's input are objects."""
    return isinstance(value, list) and not any(isinstance(item, dict) for item in value)


class Explainer:
    """Answers explain requests."""

    def __init__(self, reader: Reader, router: Router, fleet: Fleet, pin: Pin) -> None:
        self._pin = pin
        self._reader = reader
        self._router = router
        self._fleet = fleet

    async def explain(
        self, body: bytes, headers: Mapping[str, str], caller: Caller, path: str | None
    ) -> dict[str, Any]:
        """The decision as it would be taken now. Raises ApiError for a body that could not be served either."""
        document = parse_document(body)
        path = api_path(document, path)
        job = Job(
            id="explain",
            method="POST",
            path=path,
            target=path,
            caller=caller,
            body=body,
            served=resolve_model(self._fleet, document, path),
            policy=self._reader.policy(headers),
        )
        self._reader.fill(job, document)
        await self._pin(job)
        assert job.prompt is not None
        pool = self._router.pool(job)
        answer: dict[str, Any] = {
            "pool": pool.name,
            "model": document.get("model"),
            "path": path,
            "prompt_tokens": job.prompt_tokens,
        }
        request = self._router.request(job, pool, (), "")
        try:
            decided = await pool.explain(request)
            owners = await read_owners(pool, job.prompt.keys)
        except StoreError as error:
            order = self._router.fallback_order(job, pool)
            return answer | {
                "store": "fallback",
                "reason": str(error),
                "chain": _chain(job.prompt, job.tokens, []),
                "replicas": [],
                "choice": {"policy": job.policy, "why": "fallback", "order": order},
            }
        choice = orjson.loads(decided) if decided is not None else {"why": "none", "replicas": []}
        replicas = sorted(choice.pop("replicas"), key=lambda one: str(one["replica"]))
        return answer | {
            "store": "up",
            "chain": _chain(job.prompt, job.tokens, owners),
            "replicas": replicas,
            "choice": choice,
        }


def _chain(prompt: Prompt, tokens: list[int], owners: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The keys, shallow to deep, with what is behind each and who owns it."""
    return [
        {
            "key": key,
            "tokens": tokens[i],
            "text_bytes": prompt.text_bytes[i],
            "images": prompt.image_counts[i],
            "owners": owners[i]["owners"] if owners else [],
        }
        for i, key in enumerate(prompt.keys)
    ]
