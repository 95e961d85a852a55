"""Answers that follow a schema, an expression or a choice."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest
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


_TREE = {
    "type": "object",
    "properties": {
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
        "parent": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
    },
    "required": ["children", "parent"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"$ref": "#/$defs/tree"},
        {"const": [1, {"a": None}]},
        {"enum": ["é€", 1, None, True, 2.5]},
        {"type": ["integer", "null"], "minimum": -3, "exclusiveMaximum": -2},
        {"type": "integer", "exclusiveMinimum": 7.5},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMaximum": -9},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 3},
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False},
        {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 2}, "maxItems": 0},
        {"oneOf": [{"type": "string", "minLength": 20, "maxLength": 21}, {"type": "integer"}]},
        {"required": ["a"], "additionalProperties": {"type": "integer"}},
        *({"type": "string", "format": name} for name in ("date-time", "date", "time", "email", "uuid", "ipv6")),
    ],
    ids=str,
)
async def test_an_answer_is_a_document_that_its_schema_accepts(replica: RunningReplica, schema: dict[str, Any]) -> None:
    schema = {**schema, "$defs": {"tree": _TREE}}
    answer = await replica.chat("x", response_format=json_schema(schema))
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    validator.validate(json.loads(answer["choices"][0]["message"]["content"]))


async def test_an_answer_that_does_not_fit_is_cut_off(replica: RunningReplica) -> None:
    whole = await replica.chat("x", response_format=json_schema({"type": "string", "minLength": 100}))
    cut = await replica.chat("x", response_format=json_schema({"type": "string", "minLength": 100}), max_tokens=5)
    text = whole["choices"][0]["message"]["content"]
    assert cut["choices"][0]["message"]["content"] == text[:20]
    assert [each["choices"][0]["finish_reason"] for each in (whole, cut)] == ["stop", "length"]
    assert cut["usage"]["completion_tokens"] == 5


_DEEP = {str(n): {"type": "array", "minItems": 9, "items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(20)}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"type": "integer", "multipleOf": 3},
        {"$ref": "#"},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"type": "array", "minItems": 10**9},
        {"type": "string", "pattern": "a"},
        {"$defs": _DEEP, "$ref": "#/$defs/0"},
    ],
)
async def test_a_schema_to_which_it_finds_no_document_is_a_bad_request(replica: RunningReplica, schema: Any) -> None:
    body = {"model": "sim", "messages": _QUESTION, "response_format": json_schema(schema)}
    status, answer = await replica.post("/v1/chat/completions", body)
    assert (status, answer["error"]["type"]) == (400, "BadRequestError")
