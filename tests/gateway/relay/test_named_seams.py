"""Streams of messages and responses of a real vLLM 0.33, cut at each byte. With the rest from elsewhere, the client
gets the events of the whole.

`captures/vllm-named-streams.jsonl` has greedy answers of the tiny model: with a system prompt, earlier turns, events of
several tokens, characters of several tokens, stop strings. Beside each is the stream of a chat with the same prompt,
which tells token ids. From it the rest is made: an engine that gets the text so far generates what the first one did.

`captures/vllm-tool-streams.jsonl` has answers that call tools. A grammar made the tiny model say so, which the bodies
do not show. Two parsers looked for the calls: `hermes`, and `qwen3_xml`, which also tells the text behind calls.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.endpoints import ENDPOINTS, endpoint_of
from gateway.relay.continuation import CHAT, Asked, continuation, read
from gateway.relay.grammars import Grammar, grammar_of
from gateway.relay.progress import NotResumable
from gateway.relay.seam import Seam
from gateway.relay.sent import Sent
from gateway.relay.sse import EventRelay
from gateway.request.admission import Admission
from gateway.request.reading.resumable import why_not_resumed

CAPTURES = Path(__file__).parents[2] / "captures"
RECORDED = [json.loads(line) for line in (CAPTURES / "vllm-named-streams.jsonl").read_text().splitlines()]
NAMES = [f"{each['path']} {number // 2}" for number, each in enumerate(RECORDED)]
WITH_TOOLS = [json.loads(line) for line in (CAPTURES / "vllm-tool-streams.jsonl").read_text().splitlines()]
TOOL_NAMES = [f"{each['path']} tools {number // 2}" for number, each in enumerate(WITH_TOOLS)]
CALLS = ("tool_use", "function_call")
_OF_CHAT = re.compile(rb"data: (\{.*\})\n\n")


class Recording:
    """One recorded stream, and the chat beside it."""

    def __init__(self, recorded: dict[str, Any]) -> None:
        self.endpoint, self.body = endpoint_of(recorded["path"]), recorded["body"]
        self.stream = recorded["stream"].encode()
        self.chat = [orjson.loads(data) for data in _OF_CHAT.findall(recorded["chat"].encode())]
        self.prompt_ids = self.chat[0]["prompt_token_ids"]
        self.most_tokens = self.body.get("max_tokens") or self.body["max_output_tokens"]
        self.choices = [choice for event in self.chat for choice in event["choices"]]
        self.cuts = [(0, 0)]
        """So many characters, and the tokens that the engine had generated when it sent the last one of them."""
        self.ids: list[int] = []
        self.text = ""
        for choice in self.choices:
            self.ids += choice.get("token_ids") or []
            self.text += choice["delta"].get("content") or ""
            self.cuts.append((len(self.text), len(self.ids)))
        self.usage = self.chat[-1]["usage"]

    def relay(self, sent: Sent | None) -> EventRelay:
        of = self.endpoint
        return EventRelay(False, of.ends, False, of.token_mark, ending_words=of.ending_words, sent=sent)

    def read(self, sent: Sent) -> Grammar:
        grammar = grammar_of(self.endpoint, "")
        read(sent, grammar)
        return grammar

    def text_ids(self, text: str) -> list[int]:
        """The tokens of a text that was sent, as far as they are known."""
        assert self.text.startswith(text)
        sent = [cut for cut in self.cuts if cut[0] <= len(text)]
        return self.ids[: max(1, next(ids for chars, ids in sent if chars == sent[-1][0]))]

    def rest(self, body: bytes, text: str, given: list[int]) -> bytes:
        """What an engine answers to the chat that ends with this text."""
        told = orjson.loads(body)
        assert told["messages"][-1] == {"role": "assistant", "content": text}
        assert (told["continue_final_message"], told["add_generation_prompt"]) == (True, False)
        assert told["max_tokens"] == self.most_tokens - len(given)
        prompt = self.prompt_ids + given
        choices, left = [{"delta": {"role": "assistant", "content": ""}}], len(text)
        for choice in self.choices:
            content = choice["delta"].get("content") or ""
            delta = {**choice["delta"], "content": content[left:]}
            left = max(0, left - len(content))
            if choice["finish_reason"] or delta["content"] or delta.get("tool_calls"):
                delta.pop("role", None)
                choices.append({**choice, "delta": delta})
        events: list[Any] = [{"choices": [choice]} for choice in choices]
        events[0]["prompt_token_ids"] = prompt
        cached = {"cached_tokens": len(self.prompt_ids) - 1, "created_cache_tokens": len(given)}
        tokens = self.usage["completion_tokens"] - len(given)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens, "prompt_tokens_details": cached}
        events.append({"choices": [], "usage": usage | {"total_tokens": len(prompt) + tokens}})
        return b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def goes_on(recording: Recording, sent: Sent) -> bytes:
    """What the client gets after the break."""
    grammar = recording.read(sent)
    progress, seam = grammar.progress, Seam(grammar, False)
    asked = Asked(ENDPOINTS[CHAT], grammar.chat(recording.body), 4096)
    progress.was_cut(recording.text_ids(progress.text))
    if progress.finish_reason or progress.tokens >= recording.most_tokens:
        progress.prompt_tokens = progress.prompt_tokens or len(recording.prompt_ids)
        return seam.close()
    text = progress.text
    found = continuation(asked, progress)
    seam.goes_on(found)
    joined = seam.events(recording.rest(found.body, text, progress.text_ids))
    if seam.why_lost:
        raise NotResumable(seam.why_lost)
    return joined


def events_of(data: bytes) -> list[Any]:
    """The events without the comment, and without what the cache had of the prompt."""
    events: list[Any] = []
    for event in filter(None, data.split(b"\n\n")):
        name, _, told = event.partition(b"\ndata: ")
        if told:
            events.append(orjson.loads(told))
            assert name == b"event: " + events[-1]["type"].encode()
            usage = (events[-1].get("response") or events[-1]).get("usage") or {}
            usage.pop("input_tokens_details", None)
            cached = sum(usage.pop(name, 0) for name in ("cache_read_input_tokens", "cache_creation_input_tokens"))
            if "input_tokens" in usage:
                usage["input_tokens"] += cached
    return events


def said(events: list[Any]) -> list[Any]:
    """What the events say: texts are joined, and numbers are those of events that may be more or fewer. Ids are those
    of another stream, so each is told by its place in the order."""
    found: list[Any] = []
    ids: dict[str, str] = {}
    for event in events:
        event.pop("sequence_number", None)
        kept, text = found[-1] if found else None, event.get("delta")
        if kept and kept["type"] == event["type"] and text and not event.get("usage"):
            if isinstance(text, str):
                kept["delta"] += text
            else:
                name = "text" if "text" in text else "partial_json"
                kept["delta"][name] += text[name]
        else:
            found.append(in_order(event, ids))
    return found


def in_order(value: Any, ids: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [in_order(each, ids) for each in value]
    if not isinstance(value, dict):
        return value
    told = {name: in_order(each, ids) for name, each in value.items()}
    for name in ("id", "item_id", "call_id"):
        if isinstance(each := told.get(name), str):
            told[name] = ids.setdefault(each, f"{each[:3]} {len(ids)}")
    is_call = told.get("type") == "function_call"
    return {name: each for name, each in told.items() if each is not None} if is_call else told


@pytest.mark.parametrize("recorded", [*RECORDED, *WITH_TOOLS], ids=[*NAMES, *TOOL_NAMES])
def test_a_stream_cut_at_any_byte_goes_on_without_a_seam(recorded: dict[str, Any], admission: Admission) -> None:
    recording = Recording(recorded)
    assert why_not_resumed(recording.endpoint, recording.body) == ""
    whole, refused, refused_calls = said(events_of(recording.stream)), Counter[str](), Counter[str]()
    sent, got = Sent(admission, 1000), b""
    relay = recording.relay(sent)
    for at in range(len(recording.stream)):
        more = relay.feed(recording.stream[at : at + 1])
        got += more
        if not more or relay.has_ended:  # a break here is one behind the last event
            continue
        has_called = any(b'"type":"%b"' % each.encode() in got for each in CALLS)
        try:
            client = got + goes_on(recording, sent)
        except NotResumable as error:
            (refused_calls if has_called else refused)[error.reason] += 1
            continue
        assert not has_called
        events = events_of(client)
        numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
        assert numbers == list(range(len(numbers)))
        assert client.count(b": x-kvgate-resumed: 1; text\n\n") <= 1
        assert said(events) == whole, at
    assert got == recording.stream
    assert (sent.why_lost in CALLS) == bool(refused_calls), "nothing is kept that is of no use"
    sent.lose("over")
    assert admission.held_bytes.taken == 0
    assert refused.keys() <= {"beginning"}, refused
    assert refused_calls.keys() <= {*CALLS}, refused_calls
    assert refused["beginning"] <= 4, "only before the first token"


@pytest.mark.parametrize("recorded", RECORDED, ids=NAMES)
def test_most_events_are_kept_without_what_they_have_in_common(recorded: dict[str, Any], admission: Admission) -> None:
    recording = Recording(recorded)
    sent = Sent(admission, 1000)
    relay = recording.relay(sent)
    for event in recording.stream.split(b"\n\n"):
        relay.feed(event + b"\n\n")
    parts = [event for event in sent.read() if isinstance(event, tuple)]
    texts = sum(
        recording.stream.count(kind) for kind in (b"event: content_block_delta", b"event: response.output_text.delta")
    )
    assert len(parts) == texts - 1


@pytest.mark.parametrize(
    ("told", "prompt_tokens", "why"),
    [
        ([5, 7, 8, 1, 2, 3], 3, ""),
        ([5, 7, 8, 1, 2, 3], 0, ""),
        ([5, 7, 1, 2, 3], 3, ""),
        ([5, 7, 8, 1, 2, 3, 9], 3, "restarted"),
        ([5, 7, 8, 1, 2], 3, "restarted"),
        ([5, 7, 8, 6, 6, 1, 2, 3], 3, "restarted"),
    ],
    ids=["it", "not told", "one token made of two", "begins anew", "was trimmed", "another prompt"],
)
def test_a_message_goes_on_only_behind_its_text(told: list[int], prompt_tokens: int, why: str) -> None:
    grammar = grammar_of(ENDPOINTS["/v1/messages"], "m")
    grammar.take({"type": "message_start", "message": {"usage": {"input_tokens": prompt_tokens, "output_tokens": 0}}})
    grammar.take({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    grammar.take({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "and so"}})
    grammar.progress.was_cut([1, 2, 3])
    seam = Seam(grammar, False)
    seam.goes_on(continuation(Asked(ENDPOINTS[CHAT], {"messages": []}, 0), grammar.progress))
    opening = {"choices": [{"delta": {"role": "assistant"}}], "prompt_token_ids": told}
    seam.events(b"data: " + orjson.dumps(opening) + b"\n\n")
    assert seam.why_lost == why


def test_a_message_whose_engine_aborts_it_goes_on_in_a_second_block(admission: Admission) -> None:
    """vLLM ends the block before it says that it was aborted."""
    recording = Recording(RECORDED[0])
    sent = Sent(admission, 1000)
    begun, stop, _ = recording.stream.partition(b"event: content_block_stop")
    aborted = begun[: begun.rfind(b"event: content_block_delta")] + stop
    aborted += (
        b'\ndata: {"type":"content_block_stop","index":0}\n\nevent: message_delta\ndata: {"type":"message_delta",'
    )
    relay = recording.relay(sent)
    got = relay.feed(aborted + b'"delta":{"stop_reason":null},"usage":{"input_tokens":1,"output_tokens":9}}\n\n')
    assert relay.unfinished
    events = events_of(got + goes_on(recording, sent))
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", *block, *block, "message_delta", "message_stop"]
    assert [event["index"] for event in events if event["type"] == block[1]] == [0, 1]
    deltas = (event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert "".join(deltas) == recording.text
