"""A client's name of a model and its replicas' name differ: each gets its own."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AsyncExitStack
from typing import Any

import httpx
import orjson
import pytest

from gateway.endpoints import endpoint_of
from gateway.relay.asked_name import AskedName
from gateway.relay.sse import EventRelay
from gateway.replicas.served import ServedModel
from gateway.request.job import Job
from gateway.request.keyring import Caller
from gateway.request.route import Route
from gateway.settings.model_settings import ModelSettings
from tests.gateway.relay.test_own_refusals import UNKNOWN, refused
from tests.gateway.scripted import ASKED, CHAT, Relayed, ScriptedReplica, chunk, gateway_before, head, whole

ALIAS = "gpt-4o-mini"
STREAM = ("content-type: text/event-stream", "transfer-encoding: chunked")
MIB = 2**20
FINE = whole(b'{"id":"1", "model" : "m","choices":[]}', "connection: close")


@pytest.fixture
def aliased(relayed: Relayed) -> Relayed:
    """Clients can use the alias, too."""
    relayed.gateway.fleet.use_models([ModelSettings(name="m", aliases=[ALIAS])])
    return relayed


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (b'{"id":"1","model":"m","choices":[]}', b'{"id":"1","model":"A","choices":[]}'),
        (b'{\n  "model" :\t"m" }\n', b'{\n  "model" :\t"A" }\n'),
        (rb'{"model":"\u006d"}', b'{"model":"A"}'),
        (b'{"model":"other"}', b'{"model":"other"}'),
        (rb'{"text":"\"model\":\"m\"","model":"m"}', rb'{"text":"\"model\":\"m\"","model":"A"}'),
        (
            b'{"content":[{"type":"tool_use","input":{"model":"m"}}],"model":"m"}',
            b'{"content":[{"type":"tool_use","input":{"model":"m"}}],"model":"A"}',
        ),
        (b'{"metadata":{"model":"m"},"model":"m"}', b'{"metadata":{"model":"m"},"model":"A"}'),
        (b'{"model":"m', b'{"model":"m'),
        (b"", b""),
        (b"[]", b"[]"),
    ],
)
def test_of_an_answer_only_its_own_name_changes(body: bytes, wanted: bytes) -> None:
    assert AskedName("m", "A").in_body(body) == wanted


@pytest.mark.parametrize("event", [rb'{"model":"org/\u00e9\"m"}', '{"model":"org/é\\"m"}'.encode()])
def test_names_of_any_characters_are_told_apart_by_what_they_say(event: bytes) -> None:
    assert orjson.loads(AskedName('org/é"m', 'ü"x').in_body(event)) == {"model": 'ü"x'}


EVENTS = [
    b'data: {"id":"1","model":"m","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n',
    b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"\\"model\\":\\"m\\""}}],"model": "m"}\n\n',
    b'event: response.created\ndata: {"type":"response.created","response":{"tools":[{"model":"m"}],"model":"m"}}\n\n',
    b'event: message_start\r\ndata: {"type":"message_start","message":{"content":[],"model":"m"}}\r\n\r\n',
    b': a comment with a " in it\n\n',
    b"data: [DONE]\n\n",
]


def with_alias(event: bytes) -> bytes:
    """The event with the alias where its own name is: the last one."""
    before, name, after = event.rpartition(b'"m"')
    return before + b'"A"' + after if name else event


def test_wherever_a_stream_is_split_each_event_gets_the_name() -> None:
    stream, wanted = b"".join(EVENTS), b"".join(map(with_alias, EVENTS))
    assert wanted.count(b'"A"') == 4
    for at in range(len(stream)):
        relay, name = EventRelay(False, (b"[DONE]",)), AskedName("m", "A")
        assert b"".join(name.in_events(relay.feed(piece)) for piece in (stream[:at], stream[at:])) == wanted


@pytest.mark.parametrize("spaces", ["", "  \n "])
def test_wherever_a_large_answer_is_split_it_gets_the_name(spaces: str) -> None:
    text = f'{{"data":[{{"embedding":[0.5]}}],"model"{spaces}:{spaces}"m","usage":{{}}}}{" " * 300}'.encode()
    for at in range(len(text)):
        name = AskedName("m", "A")
        got = b"".join((name.in_piece(text[:at]), name.in_piece(text[at:]), name.rest()))
        assert got == text.replace(b'"m"', b'"A"')
    name = AskedName("m", "A")
    assert b"".join(name.in_piece(text[at : at + 1]) for at in range(len(text))) + name.rest() == got


async def test_the_replica_gets_its_own_name_and_the_client_its_own(aliased: Relayed) -> None:
    aliased.replica.says(FINE)
    body = b' {"messages":[{"role":"user","content":"\\u00e9 \\"model\\":\\"x\\""}],\r\n "model" : "%b","n":1.50} ' % (
        ALIAS.encode()
    )
    answer = await aliased.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.content == b'{"id":"1", "model" : "%b","choices":[]}' % ALIAS.encode()
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["x-kvgate-model"] == "m"
    assert aliased.replica.body == body.replace(ALIAS.encode(), b"m")


KEYS = {
    "api_keys": [{"name": "alice", "tenant": "a", "sha256": hashlib.sha256(b"secret").hexdigest()}],
    "cache_salt_secret": "a secret of sixteen",
}


@pytest.mark.parametrize("relayed", [{"security": KEYS}], indirect=True)
async def test_a_caller_that_sees_no_decisions_sees_the_name(aliased: Relayed) -> None:
    aliased.replica.says(FINE)
    body = {**ASKED, "model": ALIAS, "session_id": "forged"}
    headers = (await aliased.http.post(CHAT, json=body, headers={"authorization": "Bearer secret"})).headers
    assert (headers["x-kvgate-model"], "x-kvgate-replica" in headers) == ("m", False)
    salted = orjson.loads(aliased.replica.body)
    assert salted.pop("cache_salt")
    assert salted == ASKED


def test_a_request_that_is_pinned_to_a_replica_without_its_model_asks_for_no_other() -> None:
    """The replica that keeps its response may serve other models only."""
    ours, other = (ServedModel("pool", "/", None, {"r0": ""}, name=name) for name in ("m", "other"))
    path, route = "/v1/responses", Route(ALIAS, (ours,), None, ours, pinned="r0")
    job = Job("1", "POST", path, endpoint_of(path), "", Caller(None, True), "", {}, route, model=ALIAS)
    assert job.other_name == "m"
    route.aim(other)
    assert job.other_name == ""


async def test_equal_names_leave_all_as_it_is(aliased: Relayed) -> None:
    aliased.replica.says(FINE)
    answer = await aliased.ask()
    assert (answer.content, "x-kvgate-model" in answer.headers) == (b'{"id":"1", "model" : "m","choices":[]}', False)


async def test_a_body_without_a_model_stays_without(aliased: Relayed) -> None:
    aliased.replica.says(FINE)
    answer = await aliased.http.post(CHAT, json={"messages": ASKED["messages"]})
    assert (answer.json()["model"], "x-kvgate-model" in answer.headers) == ("m", False)
    assert orjson.loads(aliased.replica.body) == {"messages": ASKED["messages"]}


async def test_a_body_that_gains_fields_has_the_replicas_name(aliased: Relayed) -> None:
    aliased.replica.says(head(*STREAM), chunk(b"".join((EVENTS[0], EVENTS[-1]))), chunk(b""))
    await aliased.ask(model=ALIAS, stream=True)
    aliased.gateway.fleet.learn_usage("r0", False)
    await aliased.ask(model=ALIAS, stream=True)
    assert orjson.loads(aliased.replica.body) == {
        **ASKED,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_a_body_that_a_worker_reads_has_the_replicas_name(aliased: Relayed) -> None:
    aliased.replica.says(FINE)
    tools = [{"function": {"parameters": {"model": ALIAS}}}] * 20_000
    answer = await aliased.ask(model=ALIAS, tools=tools, session_id="forged")
    assert answer.json()["model"] == ALIAS
    assert orjson.loads(aliased.replica.body) == {**ASKED, "tools": tools}


async def test_a_form_and_a_query_have_the_replicas_name(aliased: Relayed) -> None:
    aliased.replica.says(whole(b'{"text":"hi"}', "connection: close"))
    form = {"files": {"file": ("a.wav", b"RIFF")}, "data": {"model": ALIAS, "language": "en"}}
    answer = await aliased.http.post("/v1/audio/transcriptions", **form)
    assert (answer.json(), answer.headers["x-kvgate-model"]) == ({"text": "hi"}, "m")
    assert b'name="model"\r\n\r\nm\r\n' in aliased.replica.body
    assert ALIAS.encode() not in aliased.replica.body
    await aliased.http.post("/v1/any", params={"model": ALIAS, "a": "b"})
    assert aliased.replica.head.startswith(b"POST /v1/any?model=m&a=b HTTP/1.1\r\n")


@pytest.mark.parametrize("is_at_end", [False, True])
async def test_a_large_answer_has_the_clients_name_and_comes_in_chunks(aliased: Relayed, is_at_end: bool) -> None:
    data = b'"data":[' + b"{}," * MIB + b"{}]"
    body = b'{%b,"model":"m"}' % data if is_at_end else b'{"model":"m",%b}' % data
    aliased.replica.says(whole(body, "connection: close"))
    answer = await aliased.ask("/v1/embeddings", model=ALIAS, input="x")
    assert answer.content == body.replace(b'"m"', b'"%b"' % ALIAS.encode())
    assert "content-length" not in answer.headers


async def test_each_event_of_a_stream_has_the_clients_name(aliased: Relayed) -> None:
    goes_on, seen = asyncio.Event(), b""
    stream = EVENTS[0] * 3 + EVENTS[-1]
    aliased.replica.says(
        head(*STREAM), chunk(stream[:50]), chunk(stream[50:250]), goes_on, chunk(stream[250:]), chunk(b"")
    )
    async with aliased.http.stream("POST", CHAT, json={**ASKED, "model": ALIAS, "stream": True}) as answer:
        async for piece in answer.aiter_bytes():
            seen += piece
            goes_on.set()
    assert seen == stream.replace(b'"m"', b'"%b"' % ALIAS.encode())
    assert answer.headers["x-kvgate-model"] == "m"


async def test_what_is_no_json_and_what_is_an_error_stay_as_they_are(aliased: Relayed) -> None:
    error = orjson.dumps({"error": {"message": 'bad "model":"m"'}, "model": "m"})
    aliased.replica.says(whole(error, "connection: close", status=400))
    answer = await aliased.ask(model=ALIAS)
    assert (answer.status_code, answer.content, answer.headers["x-kvgate-model"]) == (400, error, "m")
    sound = b'"model":"m"'
    aliased.replica.says(head("content-type: audio/wav", f"content-length: {len(sound)}") + sound)
    answer = await aliased.ask("/v1/audio/speech", model=ALIAS, input="x")
    assert (answer.content, answer.headers["content-length"]) == (sound, str(len(sound)))


async def test_a_name_that_no_header_can_have_is_percent_encoded(relayed: Relayed) -> None:
    name = "é\r\nx: 1"
    relayed.replica.cards, models = [{"id": name}], [{"name": name, "aliases": [ALIAS]}]
    before = gateway_before(relayed.replica, models=models)
    async with before as (_, url), httpx.AsyncClient(base_url=url) as http:
        answer = await http.post(CHAT, json={**ASKED, "model": ALIAS})
        assert answer.headers["x-kvgate-model"] == "%C3%A9%0D%0Ax: 1"
        assert orjson.loads(relayed.replica.body)["model"] == name


async def ask_two(
    names: tuple[str, str], refusal: bytes, times: int = 8
) -> tuple[list[httpx.Response], list[ScriptedReplica], list[dict[str, Any]]]:
    """Two replicas know the alias by these names; the first one answers with this refusal. Also the gateway's records
    of the requests."""
    replicas, records = [ScriptedReplica(), ScriptedReplica()], list[dict[str, Any]]()
    async with AsyncExitStack() as stack:
        for replica, name in zip(replicas, names, strict=True):
            replica.cards = [{"id": name, "root": f"/{name}"}]
            replica.says(whole(b'{"model":"%b"}' % name.encode(), "connection: close"))
            await stack.enter_async_context(replica.running())
        replicas[0].says(refusal)
        listed = [{"id": f"r{n}", "url": replica.url} for n, replica in enumerate(replicas)]
        backends = [{"match": {"model": name}} for name in names]
        models = [{"name": ALIAS, "backends": backends}]
        before = gateway_before(replicas[0], replicas=listed, models=models)
        gateway, url = await stack.enter_async_context(before)
        gateway.proxy._recorder.sinks.append(records.append)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url))
        prompts = ([{"role": "user", "content": f"{n} " * 900}] for n in range(times))
        answers = [await http.post(CHAT, json={"model": ALIAS, "messages": each}) for each in prompts]
    return answers, replicas, records


async def test_an_attempt_at_another_backend_has_the_name_of_that_backend() -> None:
    broken = whole(b'{"error":{"message":"broken"}}', "connection: close", status=500)
    answers, replicas, records = await ask_two(("v1", "v2"), broken)
    assert [orjson.loads(replica.body)["model"] for replica in replicas] == ["v1", "v2"]
    assert {(each.status_code, each.json()["model"], each.headers["x-kvgate-model"]) for each in answers} == {
        (200, ALIAS, "v2")
    }
    assert {(record["model"], record["served_model"]) for record in records} == {(ALIAS, "v2")}


async def test_a_replica_that_has_unloaded_the_served_model_is_left_for_another() -> None:
    """It says so of the name that it was asked for, in words only."""
    error = {**UNKNOWN, "message": "The model `v1` does not exist.", "param": None}
    answers, replicas, _ = await ask_two(("v1", "v2"), refused(error, 404))
    assert {answer.status_code for answer in answers} == {200}
    assert replicas[0].asked, "it was tried"
