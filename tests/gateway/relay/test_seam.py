"""Streams of a real vLLM 0.33, cut at each byte: with the rest from elsewhere, the client gets the events of the whole.

`captures/vllm-streams.jsonl` has greedy answers of the tiny model, with characters of several tokens, events of several
tokens, and stop strings. The rest is made of the same recording: an engine that gets the ids so far generates what the
first one did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.endpoints import endpoint_of
from gateway.relay.continuation import Asked, Continuation, continuation, read
from gateway.relay.grammars import Grammar, grammar_of
from gateway.relay.progress import NotResumable
from gateway.relay.resumptions import _rest_of
from gateway.relay.seam import Seam
from gateway.relay.sent import Sent
from gateway.relay.sse import EventRelay
from gateway.replicas.served import ServedModel
from gateway.request.admission import Admission
from gateway.request.job import Job
from gateway.request.keyring import Caller
from gateway.request.route import Route
from gateway.settings.limit_settings import LimitSettings

CAPTURES = Path(__file__).parents[2] / "captures" / "vllm-streams.jsonl"
RECORDED = [json.loads(line) for line in CAPTURES.read_text().splitlines()]
NAMES = [f"{each['path']} {number // 2}" for number, each in enumerate(RECORDED)]
LONGEST_TOKENS = 4096
DONE = b"data: [DONE]\n\n"


def documents(data: bytes) -> list[dict[str, Any]]:
    return [orjson.loads(event[6:]) for event in data.split(b"\n\n") if event.startswith(b"data: {")]


def text_of(choice: dict[str, Any]) -> str:
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


def said(events: list[dict[str, Any]]) -> tuple[str, list[str], list[Any]]:
    """The text, the finish reasons and the usage of an answer, without what its cache had."""
    choices = [choice for event in events for choice in event["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return "".join(map(text_of, choices)), reasons, [_tokens(event["usage"]) for event in events if event.get("usage")]


def _tokens(usage: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


class Recording:
    """One recorded stream."""

    def __init__(self, recorded: dict[str, Any]) -> None:
        self.endpoint = endpoint_of(recorded["path"])
        self.body: dict[str, Any] = recorded["body"]
        self.stream = recorded["with_token_ids"].encode()
        self.events = documents(self.stream)
        self.asked = Asked(self.endpoint, self.body, LONGEST_TOKENS)

    def relay(self, sent: Sent) -> EventRelay:
        of = self.endpoint
        return EventRelay(False, of.ends, True, of.token_mark, ending_words=of.ending_words, sent=sent)

    def read(self, sent: Sent) -> Grammar:
        """What a client has got."""
        grammar = grammar_of(self.endpoint, "")
        read(sent, grammar)
        return grammar

    def rest(self, found: Continuation) -> bytes:
        """What an engine answers to the request for the rest: a token an event."""
        told = orjson.loads(found.body)
        ids = [token for event in self.events for each in event["choices"] for token in each.get("token_ids") or ()]
        assert told["prompt"][len(told["prompt"]) - found.given_tokens :] == ids[: found.given_tokens]
        assert told["max_tokens"] == self.body["max_tokens"] - found.given_tokens
        text, (reason,), _ = said(self.events)
        left = text[self.chars_at(found.given_tokens) :]
        rest_ids, out = ids[found.given_tokens :], list[dict[str, Any]]()
        for number, token in enumerate(rest_ids):
            is_last = number == len(rest_ids) - 1
            piece = left if is_last else left[number : number + 1]
            left = left if is_last else left[:number] + left[number:]
            choice = {"index": 0, "text": piece, "logprobs": None, "finish_reason": reason if is_last else None}
            out.append({"choices": [choice | {"stop_reason": None, "prompt_token_ids": None, "token_ids": [token]}]})
        return self._written(out, left, len(told["prompt"]), len(rest_ids))

    def _written(self, events: list[dict[str, Any]], text: str, prompt_tokens: int, tokens: int) -> bytes:
        """With the text shared out: one character an event, and what is left in the last one."""
        *before, last = events
        for number, event in enumerate(before):
            event["choices"][0]["text"] = text[number : number + 1]
        last["choices"][0]["text"] = text[len(before) :]
        usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + tokens, "completion_tokens": tokens}
        envelope = {"id": "cmpl-other", "object": "text_completion", "created": 1, "model": "other"}
        documents = [envelope | event for event in (*events, {"choices": [], "usage": usage})]
        return b"".join(b"data: " + orjson.dumps(each) + b"\n\n" for each in documents) + DONE

    def chars_at(self, ids: int) -> int:
        """How many characters an engine has decoded with so many token ids."""
        held_back = max((len(stop) for stop in self.body.get("stop", [])), default=1) - 1
        if not ids:
            return 0
        seen = chars = 0
        for event in self.events:
            for choice in event["choices"]:
                seen, chars = seen + len(choice.get("token_ids") or ()), chars + len(text_of(choice))
                if seen == ids:
                    return chars + held_back
        raise AssertionError(ids)


@pytest.mark.parametrize("recorded", RECORDED, ids=NAMES)
def test_a_stream_cut_at_any_byte_goes_on_without_a_seam(recorded: dict[str, Any], admission: Admission) -> None:
    recording = Recording(recorded)
    kept = Sent(admission, 1000)
    whole = recording.relay(kept).feed(recording.stream)
    kept.lose("over")
    refused, sent, got = {"beginning": 0}, Sent(admission, 1000), b""
    relay = recording.relay(sent)
    for at in range(len(recording.stream)):
        more = relay.feed(recording.stream[at : at + 1])
        got += more
        if not more:  # a break here is one behind the last event
            continue
        try:
            client = got + (b"" if DONE in got else goes_on(recording, sent))
        except NotResumable as error:
            refused[error.reason] += 1
            continue
        assert client.count(DONE) == 1
        events = documents(client)
        assert said(events) == said(documents(whole)), at
        assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
        assert shapes(events) <= shapes(documents(whole))
    sent.lose("over")
    assert admission.held_bytes.taken == 0
    assert sum(refused.values()) <= 2, "only before the first token"


def shapes(events: list[dict[str, Any]]) -> set[tuple[str, ...]]:
    """The fields of the parts of an answer, without the last one, which tells more."""
    parts = [choice | event for event in events for choice in event["choices"] if not choice["finish_reason"]]
    return {tuple(sorted(part)) for part in parts}


def goes_on(recording: Recording, sent: Sent) -> bytes:
    """What the client gets after the break."""
    grammar = recording.read(sent)
    progress, wants_usage = grammar.progress, bool(recording.body.get("stream_options"))
    seam = Seam(grammar, wants_usage)
    if progress.finish_reason or progress.tokens >= recording.body["max_tokens"]:
        return seam.close()
    found = continuation(recording.asked, progress)
    assert found.is_exact
    seam.goes_on(found)
    joined = seam.events(recording.rest(found))
    assert seam.why_lost == ""
    return joined


@pytest.mark.parametrize("recorded", RECORDED, ids=NAMES)
def test_what_the_gateway_asked_for_is_not_seen(recorded: dict[str, Any], admission: Admission) -> None:
    recording = Recording(recorded)
    got = recording.relay(Sent(admission, 1000)).feed(recording.stream)
    assert b'token_ids":[' not in got
    plain, seen = documents(recorded["plain"].encode()), documents(got)
    assert said(seen)[:2] == said(plain)[:2]
    assert {frozenset(event) for event in seen} == {frozenset(event) for event in plain}


def test_a_stream_that_is_not_what_it_was_is_given_up(admission: Admission) -> None:
    recording = next(each for each in map(Recording, RECORDED) if each.body.get("stop"))
    sent = Sent(admission, 1000)
    recording.relay(sent).feed(recording.stream[: len(recording.stream) // 2])
    grammar = recording.read(sent)
    seam = Seam(grammar, False)
    seam.goes_on(Continuation("/v1/completions", b"", True, grammar.progress.places[-2].ids, "what the client had"))
    assert seam.events(recording._written(list(other()), "something else", 3, 2)) == b""
    assert seam.why_lost == "diverged"


def other() -> Iterator[dict[str, Any]]:
    for reason in (None, "length"):
        yield {"choices": [{"index": 0, "text": "", "finish_reason": reason, "token_ids": [1]}]}


@pytest.mark.parametrize(
    ("behind", "text", "why", "how"),
    [
        ([1, 2, 3], "and so ", "", "exact"),
        ([1, 9], "and so", "", "text"),
        ([1, 9], "and so ", "restarted", "text"),
        ([1, 2, 3, 0, 7, 8, 9], "and so", "restarted", "text"),
        ([], "and so", "restarted", "text"),
    ],
    ids=["the same tokens", "other tokens", "perhaps trimmed", "the answer begins anew", "no answer"],
)
def test_a_chat_goes_on_only_behind_its_answer(behind: list[int], text: str, why: str, how: str) -> None:
    grammar = grammar_of(endpoint_of("/v1/chat/completions"), "m")
    progress = grammar.progress
    progress.text, progress.ids, progress.prompt_ids = text, [1, 2, 3], [5, 7, 8, 9]
    progress.shape = {"id": "a", "choices": [{"delta": {"content": "and"}}]}
    seam = Seam(grammar, True)
    seam.goes_on(Continuation("/v1/chat/completions", b"", False, 3))
    opening = {"choices": [{"index": 0, "delta": {"role": "assistant"}}], "prompt_token_ids": [5, 7, 8, 9, *behind]}
    usage = {"prompt_tokens": 4 + len(behind), "completion_tokens": 2, "total_tokens": 6 + len(behind)}
    events = [
        opening,
        {"choices": [{"delta": {"content": "on"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": usage},
    ]
    got = documents(seam.events(b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)))
    assert (seam.why_lost, seam.how) == (why, how)
    wanted = [] if why else [{"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}]
    assert [event["usage"] for event in got if "usage" in event] == wanted
    assert [text_of(choice) for event in got for choice in event["choices"]] == ([] if why else ["on"])


def test_sampled_text_that_was_held_back_is_not_made_anew(admission: Admission) -> None:
    recording = next(each for each in map(Recording, RECORDED) if each.body.get("stop"))
    sampled = Asked(recording.endpoint, recording.body | {"temperature": 0.7}, LONGEST_TOKENS)
    ways = set()
    for at in range(len(recording.stream) // 2, len(recording.stream) // 2 + 2000, 100):
        sent = Sent(admission, 1000)
        recording.relay(sent).feed(recording.stream[:at])
        found = continuation(sampled, recording.read(sent).progress)
        assert found.overlap == ""
        ways.add(found.path)
    assert "/v1/chat/completions" in ways


@pytest.mark.parametrize(
    ("most_tokens", "limit_bytes", "why"), [(5, 2**30, "length"), (1000, 8192, "memory")], ids=["tokens", "memory"]
)
def test_what_is_kept_is_bounded(most_tokens: int, limit_bytes: int, why: str) -> None:
    admission = Admission(LimitSettings(max_buffered_bytes=limit_bytes))
    recording = Recording(RECORDED[0])
    sent = Sent(admission, most_tokens)
    relay = recording.relay(sent)
    for event in recording.stream.split(b"\n\n"):
        for _ in range(20):
            relay.feed(event + b"\n\n")
    with pytest.raises(NotResumable, match=why):
        recording.read(sent)
    assert admission.held_bytes.taken == 0


def test_a_blank_line_too_many_loses_no_token(admission: Admission) -> None:
    recording = Recording(RECORDED[0])
    found = []
    for more in (b"", b"\n"):
        sent = Sent(admission, 1000)
        relay = recording.relay(sent)
        for number, event in enumerate(recording.stream.split(b"\n\n")[:12]):
            relay.feed(event + b"\n\n" + (more if number == 5 else b""))
        progress = recording.read(sent).progress
        found.append((progress.text, progress.ids))
    assert found[0] == found[1]


def test_a_completion_without_token_ids_goes_on_behind_its_text(admission: Admission) -> None:
    recorded = next(each for each in RECORDED if each["path"] == "/v1/completions")
    endpoint, stream, sent = endpoint_of(recorded["path"]), recorded["plain"].encode(), Sent(admission, 1000)
    words = endpoint.ending_words
    relay = EventRelay(False, endpoint.ends, False, endpoint.token_mark, ending_words=words, sent=sent)
    got = b"".join(relay.feed(event + b"\n\n") for event in stream.split(b"\n\n")[:20])
    found = continuation(Asked(endpoint, recorded["body"], 0), Recording(recorded).read(sent).progress)
    assert orjson.loads(found.body)["prompt"] == recorded["body"]["prompt"] + said(documents(got))[0]
    assert (found.is_exact, orjson.loads(found.body)["max_tokens"]) == (False, 20)


def test_the_rest_waits_as_long_as_any_request_and_keeps_the_token_ids_that_it_asks_for() -> None:
    endpoint = endpoint_of("/v1/chat/completions")
    served = ServedModel("m", "m", None, {"r0": "http://r0"})
    route = Route("m", (served,), None, served, held_since_s=5, waited_s=3)
    job = Job("1", "POST", "/v1/chat/completions", endpoint, "", Caller(None, True), "", {}, route)
    exact, by_message, by_text = (
        _rest_of(job, Continuation(path, b"{}", is_exact, 9))
        for path, is_exact in (("/v1/completions", True), ("/v1/chat/completions", False), ("/v1/completions", False))
    )
    assert (exact.route.held_since_s, exact.route.waited_s, route.held_since_s) == (0, 0, 5)
    assert [each.wants_token_ids for each in (exact, by_message, by_text)] == [True, True, False]
