"""Requests that compute a prompt and generate nothing (embeddings, scores, ranks), and the tokenizer."""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from aiohttp import web
from blake3 import blake3

from gateway.simulator import fields
from gateway.simulator.answers import GeneratedAnswer
from gateway.simulator.call import Call
from gateway.simulator.engine import SimUsage
from gateway.simulator.errors import bad_request
from gateway.simulator.openai_api import chat_prompt, text_prompt
from gateway.simulator.prompt import EnginePrompt, token_ids

_DIMENSIONS = 64
_NOTHING = GeneratedAnswer((), "stop")


async def embeddings(call: Call) -> web.StreamResponse:
    model, lora = call.replica.resolve_model(fields.text(call.body, "model"))
    if "messages" in call.body:
        prompts = [chat_prompt(call.replica, call.body, lora)]
    else:
        prompts = [text_prompt(each, lora) for each in _inputs(call.body.get("input"))]
    answers = [_NOTHING] * len(prompts)
    usage = await _compute(call, prompts, answers)
    encode = _as_base64 if call.body.get("encoding_format") == "base64" else array.tolist
    sizes = [0 if answer.finish_reason == "abort" else _DIMENSIONS for answer in answers]  # an aborted one is empty
    vectors = [encode(_vector(prompt.seed, size)) for prompt, size in zip(prompts, sizes, strict=True)]
    return await _list_of(call, f"embd-{call.request_id}", model, "embedding", vectors, usage)


async def score(call: Call) -> web.StreamResponse:
    """Scores each of `text_2` against `text_1`, or pair by pair for two lists of equal length."""
    model, lora = call.replica.resolve_model(fields.text(call.body, "model"))
    queries = _texts(call.body, "text_1", "queries")
    documents = _texts(call.body, "text_2", "documents")
    if len(queries) == 1:
        queries *= len(documents)
    if len(queries) != len(documents):
        raise bad_request("Input lengths must be either 1:1, 1:N or N:N", "text_1")
    scores, usage = await _scores(call, zip(queries, documents, strict=True), lora)
    return await _list_of(call, f"score-{call.request_id}", model, "score", scores, usage)


async def rerank(call: Call) -> web.StreamResponse:
    model, lora = call.replica.resolve_model(fields.text(call.body, "model"))
    query = fields.required_text(call.body, "query")
    documents = _texts(call.body, "documents")
    top_n = fields.integer(call.body, "top_n", minimum=0) or len(documents)
    scores, usage = await _scores(call, ((query, text) for text in documents), lora)
    results = [
        {"index": index, "document": {"text": documents[index]}, "relevance_score": scores[index]}
        for index in sorted(range(len(scores)), key=lambda index: -scores[index])
    ]
    return await call.respond(
        {
            "id": f"rerank-{call.request_id}",
            "model": model,
            "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.total_tokens},
            "results": results[:top_n],
        }
    )


async def tokenize(call: Call) -> web.StreamResponse:
    _, lora = call.replica.resolve_model(fields.text(call.body, "model"))
    if "messages" in call.body:
        prompt = chat_prompt(call.replica, call.body, lora)
    else:
        prompt = text_prompt(fields.required_text(call.body, "prompt"), lora)
    ids = token_ids(prompt.tokens)
    limit = call.replica.settings.max_model_len
    return await call.respond({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None})


async def _scores(call: Call, pairs: Iterable[tuple[str, str]], lora: str | None) -> tuple[list[float], SimUsage]:
    """Computes each query with its text."""
    prompts = [text_prompt(f"{query}\n{text}", lora) for query, text in pairs]
    usage = await _compute(call, prompts, [_NOTHING] * len(prompts))
    return [int.from_bytes(prompt.seed[:4], "big") / 2**32 for prompt in prompts], usage


async def _compute(call: Call, prompts: Sequence[EnginePrompt], answers: list[GeneratedAnswer]) -> SimUsage:
    if not prompts:
        raise bad_request("At least one input is required")
    generation = call.generate(prompts, answers)
    await call.complete(generation)
    return generation.usage()


def _inputs(given: object) -> list[object]:
    """An embedding request's inputs: text, token ids, or a list of either."""
    return given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]


def _texts(body: dict[str, Any], *names: str) -> list[str]:
    """The texts under the first of `names` in the body: one text, a list, or a list of {"text": …}."""
    name = next((name for name in names if name in body), names[0])
    given = body.get(name)
    items = [given] if isinstance(given, str) else fields.sequence(body, name)
    texts = [
        item if isinstance(item, str) else fields.required_text(fields.as_mapping(item, name), "text") for item in items
    ]
    if not texts:
        raise bad_request(f"{name}: Field required", name)
    return texts


def _vector(seed: bytes, dimensions: int) -> array[float]:
    """Numbers in [-1, 1), drawn from the digest."""
    return array("f", [byte / 128 - 1 for byte in blake3(seed).digest(length=dimensions)])


def _as_base64(vector: array[float]) -> str:
    return base64.b64encode(vector.tobytes()).decode()


async def _list_of(
    call: Call, answer_id: str, model: str, kind: str, values: Sequence[object], usage: SimUsage
) -> web.StreamResponse:
    tokens = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.total_tokens}
    return await call.respond(
        {
            "id": answer_id,
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [{"index": index, "object": kind, kind: value} for index, value in enumerate(values)],
            "usage": {**tokens, "completion_tokens": 0, "prompt_tokens_details": None},
        }
    )
