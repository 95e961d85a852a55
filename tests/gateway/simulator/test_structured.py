"""Answers that follow a schema, an expression or a choice."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import hypothesis.strategies as st
import openai
import pydantic
import pytest
from hypothesis import given, settings
from jsonschema import Draft202012Validator

from tests.gateway.simulator.conftest import RunningReplica

_QUESTION: list[Any] = [{"role": "user", "content": "What is it?"}]


class Step(pydantic.BaseModel):
    explanation: str
    weight: float
    done: bool


class Plan(pydantic.BaseModel):
    steps: list[Step]
    kind: Literal["short", "long"]
    note: str | None
    followed_by: list[Plan]


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def test_the_openai_client_parses_what_a_model_of_pydantics_asks_for(replica: RunningReplica) -> None:
    client = replica.openai
    chat = await client.chat.completions.parse(model="sim", messages=_QUESTION, response_format=Plan)
    assert chat.choices[0].finish_reason == "stop"
    plan = chat.choices[0].message.parsed
    assert isinstance(plan, Plan)
    assert plan.steps
    async with client.chat.completions.stream(model="sim", messages=_QUESTION, response_format=Plan) as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_completion()).choices[0].message.parsed == plan
    assert isinstance((await client.responses.parse(model="sim", input="x", text_format=Plan)).output_parsed, Plan)
    with pytest.raises(openai.LengthFinishReasonError):
        await client.chat.completions.parse(model="sim", messages=_QUESTION, response_format=Plan, max_tokens=4)


async def test_every_api_answers_as_a_schema_says(replica: RunningReplica) -> None:
    schema = {"type": "object", "properties": {"at": {"enum": [1, 2]}, "of": {"const": "ä"}}, "required": ["at", "of"]}
    forced = {"tools": [{"type": "function", "function": {"name": "look", "parameters": schema}}]}
    _, chat = await replica.post(
        "/v1/chat/completions", {"messages": _QUESTION, **forced, "tool_choice": "required", "model": "sim"}
    )
    _, completion = await replica.post(
        "/v1/completions", {"prompt": "x", "max_tokens": 64, "response_format": json_schema(schema)}
    )
    text = {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
    response = await replica.openai.responses.create(model="sim", input="x", text=text)  # type: ignore[call-overload]
    _, message = await replica.post(
        "/v1/messages",
        {"model": "sim", "max_tokens": 64, "messages": _QUESTION, "output_config": {"format": {"schema": schema}}},
    )
    texts = [
        chat["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"],
        completion["choices"][0]["text"],
        response.output_text,
        message["content"][0]["text"],
    ]
    for each in texts:
        Draft202012Validator(schema).validate(json.loads(each))


_PATTERNS = [r"^\d{3}-[a-f]+$", r"^(?:red|gr[ae]y)?x*$", r"[^\s,]{2,}@\w+\.(com|org)", r"^[\w.-]+\/\d\d?$"]
_strings = st.one_of(
    st.just({"type": "string"}),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, *[st.integers(0, 9)] * 2
    ),
    st.sampled_from(["date-time", "date", "time", "email", "uuid", "ipv4", "ipv6"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    st.sampled_from(_PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
)
_numbers = st.one_of(
    st.builds(
        lambda kind, low, more: {"type": kind, "minimum": low, "exclusiveMaximum": low + more},
        st.sampled_from(["integer", "number"]),
        st.integers(-9, 9),
        st.integers(1, 5),
    ),
    st.builds(
        lambda kind, step, high: {"type": kind, "multipleOf": step, "maximum": high},
        st.sampled_from(["integer", "number"]),
        st.sampled_from([3, 0.25, 1.5]),
        st.integers(-9, 9),
    ),
    st.builds(
        lambda low, high: {"allOf": [{"type": "number", "minimum": low}, {"type": "integer", "minimum": high}]},
        st.integers(-9, 9),
        st.integers(-9, 9),
    ),
)
_leaves = st.one_of(
    _strings,
    _numbers,
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"$ref": "#/$defs/tree"}, {}, {"const": [1, {"a": None}]}]),
    st.lists(st.sampled_from(["é€", 1, None, True, 2.5]), min_size=1, max_size=3).map(lambda values: {"enum": values}),
)


def _containers(inner: Any) -> Any:
    named = st.dictionaries(st.sampled_from("abcde"), inner, max_size=3)
    return st.one_of(
        st.builds(
            lambda properties, required, others: {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": others,
            },
            named,
            st.lists(st.sampled_from("abcde"), unique=True, max_size=2),
            st.one_of(st.just(True), inner),
        ),
        st.builds(
            lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
            inner,
            st.integers(0, 3),
            st.integers(0, 2),
        ),
        st.builds(lambda first, rest: {"type": "array", "prefixItems": [first], "items": rest}, inner, inner),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
        st.builds(lambda some, others: {"allOf": [{"properties": some}, {"properties": others}]}, named, named).map(
            lambda schema: schema if _is_disjoint(schema) else {"type": "object"}
        ),
    )


def _is_disjoint(schema: dict[str, Any]) -> bool:
    one, other = schema["allOf"]
    return not one["properties"].keys() & other["properties"].keys()


_TREE = {
    "type": "object",
    "properties": {
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
        "parent": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
    },
    "required": ["children", "parent"],
    "additionalProperties": False,
}


@settings(max_examples=200)
@given(schema=st.recursive(_leaves, _containers, max_leaves=8), stream=st.booleans())
async def test_whatever_the_schema_the_answer_is_a_document_that_it_accepts(
    replica: RunningReplica, schema: dict[str, Any], stream: bool
) -> None:
    schema = {**schema, "$defs": {"tree": _TREE}}
    body = {"model": "sim", "messages": _QUESTION, "response_format": json_schema(schema)}
    if stream:
        chunks = await replica.chunks("/v1/chat/completions", body)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    else:
        _, answer = await replica.post("/v1/chat/completions", body)
        text = answer["choices"][0]["message"]["content"]
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    validator.validate(json.loads(text))


async def test_a_json_object_is_what_a_message_asks_for_or_any(replica: RunningReplica) -> None:
    schema = {"properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    for asked in (f"Answer like {{this}}:\n{json.dumps(schema, indent=2)}\nOnly JSON.", "As you like, {…}"):
        answer = await replica.chat(asked, response_format={"type": "json_object"})
        document = json.loads(answer["choices"][0]["message"]["content"])
        assert isinstance(document, dict)
        assert (document.get("city") in ("Rome", "Oslo")) == ("Rome" in asked)


async def test_no_token_of_a_document_has_half_a_character(replica: RunningReplica) -> None:
    schema = {"const": "a€éö€ a€"}
    answer = await replica.chat("x", response_format=json_schema(schema), return_token_ids=True)
    (choice,) = answer["choices"]
    _, text = await replica.post("/detokenize", {"model": "sim", "tokens": choice["token_ids"]})
    assert text["prompt"] == choice["message"]["content"] == '"a€éö€ a€"'


async def test_an_answer_that_does_not_fit_is_cut_off(replica: RunningReplica) -> None:
    whole = await replica.chat("x", response_format=json_schema({"type": "string", "minLength": 100}))
    cut = await replica.chat("x", response_format=json_schema({"type": "string", "minLength": 100}), max_tokens=5)
    text = whole["choices"][0]["message"]["content"]
    assert cut["choices"][0]["message"]["content"] == text[:20]
    assert [each["choices"][0]["finish_reason"] for each in (whole, cut)] == ["stop", "length"]
    assert cut["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "#/$defs/none"},
        {"$ref": "#"},
        {"enum": []},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "minItems": 10**9},
        {"type": "string", "minLength": 10**18},
        {"type": "string", "pattern": "(a{1000}){1000}{1000}"},
        {"type": "string", "pattern": "("},
        {"type": "number", "multipleOf": 0},
        {"type": "array", "uniqueItems": True, "minItems": 3, "items": {"type": "boolean"}},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {
            "$defs": {
                str(n): {"type": "array", "minItems": 9, "items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(20)
            },
            "$ref": "#/$defs/0",
        },
    ],
    ids=str,
)
async def test_a_schema_that_nothing_satisfies_is_a_bad_request(replica: RunningReplica, schema: Any) -> None:
    body = {"model": "sim", "messages": _QUESTION, "response_format": json_schema(schema)}
    status, answer = await replica.post("/v1/chat/completions", body)
    assert (status, answer["error"]["type"]) == (400, "BadRequestError")


async def test_choices_and_expressions_are_kept_to(replica: RunningReplica) -> None:
    expression = r"\+\d{1,3} (\(0\))?[1-9][0-9]{2,}(?:-[A-Z]+)*"
    for outputs, expected in (({"choice": ["yes", "no"]}, "yes|no"), ({"regex": expression}, expression)):
        for prompt in "abcdef":
            body = {"prompt": prompt, "max_tokens": 99, "structured_outputs": outputs}
            _, answer = await replica.post("/v1/completions", body)
            assert re.fullmatch(expected, answer["choices"][0]["text"])
            assert answer["choices"][0]["finish_reason"] == "stop"
