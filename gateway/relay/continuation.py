"""How a stream that broke goes on at another replica: the request for the rest. Pure.

`exact`: the rest is asked for by the token ids of the prompt and of the answer, at /v1/completions. So the engine goes
on as the first one would have. `text`: it goes on behind its text, which the engine may cut into other tokens. A chat
with images or tools, or whose engine parses the answer, ends with a message of the assistant that is to be continued.
So does a chat in the place of a request of another API, whose stream tells no token ids. Some engines ignore that and
begin the answer anew: the token ids of the prompt show it (seam.py).

Text lags behind token ids: an engine holds it back while it may be the beginning of a stop string, or a part of a
character (vLLM 0.33, v1/engine/detokenizer.py). A prompt must not end inside a character either: vLLM would send all of
it once more. So the rest is generated from the last token that surely ended with its own text. What the client has got
of the text behind it comes again, and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from gateway.endpoints import Endpoint
from gateway.relay.endings import unfinished
from gateway.relay.grammars import Grammar
from gateway.relay.progress import NotResumable, Progress
from gateway.relay.sent import Sent
from gateway.request.reading.output import output_of, whole_number
from gateway.request.reading.resumable import SAMPLING

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"


def read(sent: Sent, grammar: Grammar) -> None:
    """Reads what a client has got. Raises NotResumable."""
    if sent.why_lost:
        raise NotResumable(sent.why_lost)
    progress = grammar.progress
    try:
        progress.prompt_ids = orjson.loads(b"[%b]" % sent.prompt_ids)
        for event in sent.read():
            if isinstance(event, tuple):
                grammar.take_part(*event)
            elif unfinished(event) is not None:  # the client has not got it
                break
            else:
                grammar.take(event)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NotResumable("events") from None
    if not progress.shape:
        raise NotResumable("beginning")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known of the request whose answer goes on."""

    endpoint: Endpoint
    document: dict[str, Any]
    """Its body for replicas."""
    longest_tokens: int
    """The most tokens of a prompt and its answer; 0 if that is not known."""
    is_plain: bool = True
    """Whether token ids say all of its prompt, and the engine looks for nothing in the answer but text."""

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of its answer, as far as it says."""
        return output_of(self.endpoint, self.document)[1]


@dataclass(frozen=True, slots=True)
class Continuation:
    """The request for the rest of an answer."""

    path: str
    body: bytes
    is_exact: bool
    given_tokens: int
    """The tokens of the answer that are a part of its prompt."""
    overlap: str = ""
    """What the rest begins with, and the client has got already."""


def continuation(asked: Asked, progress: Progress) -> Continuation:
    """The request for the rest, of which there is some. Raises NotResumable if there is no way to ask for it."""
    document, has_ids = asked.document, bool(progress.ids and progress.prompt_ids)
    if asked.is_plain and has_ids and not progress.is_parsed:
        given, overlap_chars = progress.last_place(_held_back_chars(document))
        if not overlap_chars or document.get("temperature") == 0:  # else it would come again in other words
            return _by_ids(asked, progress, given, overlap_chars)
    if asked.endpoint.prompt == "chat" and (progress.prompt_ids or progress.text_ids):
        return _by_message(asked, progress)
    if asked.endpoint.prompt == "completion" and isinstance(document.get("prompt"), str):
        return _by_text(asked, progress)
    raise NotResumable("place" if has_ids else "token_ids")


def _by_ids(asked: Asked, progress: Progress, given: int, overlap_chars: int) -> Continuation:
    """Raises NotResumable if no token is left in the engine's context."""
    document, most_tokens = asked.document, asked.most_tokens
    if most_tokens is None:  # /v1/completions takes a missing limit for 16 tokens
        most_tokens = asked.longest_tokens - len(progress.prompt_ids)
        if most_tokens <= given:
            raise NotResumable("max_tokens")
    told = {"prompt": progress.prompt_ids + progress.ids[:given], "add_special_tokens": False, "return_token_ids": True}
    overlap = progress.text[-overlap_chars:] if overlap_chars else ""
    body = _sampling(document) | told | _limits(document, "max_tokens", most_tokens, given) | _streamed(document)
    return Continuation(COMPLETIONS, orjson.dumps(body), True, given, overlap)


def _by_message(asked: Asked, progress: Progress) -> Continuation:
    """Raises NotResumable if the client has got no text, or has begun the answer itself in another form."""
    document, text, tokens = asked.document, progress.text, progress.tokens
    messages = document["messages"]
    if not text:
        raise NotResumable("beginning")
    if document.get("continue_final_message"):
        *before, last = messages
        if not isinstance(begun := last.get("content"), str):
            raise NotResumable("continue_final_message")
        messages = [*before, {**last, "content": begun + text}]
    else:
        messages = [*messages, {"role": "assistant", "content": text}]
    told = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    name = "max_tokens" if document.get("max_completion_tokens") is None else "max_completion_tokens"
    limits = _limits(document, name, asked.most_tokens, tokens)
    body = document | told | limits | _streamed(document) | {"return_token_ids": True}
    return Continuation(CHAT, orjson.dumps(body), False, tokens)


def _by_text(asked: Asked, progress: Progress) -> Continuation:
    document, most_tokens = asked.document, asked.most_tokens
    told = {"prompt": document["prompt"] + progress.text, "max_tokens": None}  # none, unless the client has set one
    if "add_special_tokens" in document:
        told["add_special_tokens"] = document["add_special_tokens"]
    limits = _limits(document, "max_tokens", most_tokens, progress.tokens)
    body = _sampling(document) | told | limits | _streamed(document)
    return Continuation(COMPLETIONS, orjson.dumps(body), False, progress.tokens)


def _sampling(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name in SAMPLING or name == "model"}


def _limits(document: Mapping[str, Any], name: str, most_tokens: int | None, given_tokens: int) -> dict[str, int]:
    """What is left of the limits of an answer: one token at least."""
    limits = {} if most_tokens is None else {name: max(1, most_tokens - given_tokens)}
    if least := whole_number(document.get("min_tokens")):
        limits["min_tokens"] = min(limits.get(name, least), max(0, least - given_tokens))
    return limits


def _streamed(document: Mapping[str, Any]) -> dict[str, Any]:
    options = document.get("stream_options")
    wanted = {**options, "include_usage": True} if isinstance(options, dict) else {"include_usage": True}
    return {"stream": True, "stream_options": wanted}


def _held_back_chars(document: Mapping[str, Any]) -> int:
    """How many characters an engine holds back, because they may be the beginning of a stop string."""
    stop = document.get("stop") or ()
    strings = [stop] if isinstance(stop, str) else stop
    return max((len(each) for each in strings if isinstance(each, str)), default=1) - 1
