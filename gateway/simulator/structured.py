"""The constraints of an answer: `response_format`, and vLLM's own `structured_outputs`."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import orjson

from gateway.simulator.errors import bad_request, bad_value
from gateway.simulator.json_schema import NoValue, json_text, text_for

Constraint = Callable[[bytes], str]
"""Makes the text of an answer, the same one for the same seed. Raises a 400 if there is none."""

_ANY_OBJECT = {"properties": {"answer": {"type": "string"}}}
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_HOW_MANY = "You must use one kind of structured outputs constraint"
_HOW_MANY_AT_MOST = "You can only use one kind of structured outputs constraint"


def constraint(body: dict[str, Any]) -> Constraint | None:
    """The constraint of a chat or completions body, or None. Raises a 400."""
    response_format, outputs = body.get("response_format"), body.get("structured_outputs")
    kind = "text" if response_format is None else response_format["type"]
    if kind == "text" and outputs is None:
        return None
    wanted = {} if outputs is None else {kind: outputs[kind] for kind in _KINDS if outputs.get(kind) is not None}
    if len(wanted.keys() & {"json", "regex", "choice"}) > 1:
        message = "You can only use one kind of constraints for structured outputs ('json', 'regex' or 'choice')."
        raise bad_request(message)
    match kind:
        case "json_object" | "structural_tag":
            wanted[kind] = True
        case "json_schema":
            wanted |= _schema_of(response_format or {})
    if not wanted:
        raise bad_request(f"{_HOW_MANY} but none are specified: {outputs or response_format}")
    if len(wanted) > 1:
        raise bad_request(f"{_HOW_MANY_AT_MOST} but multiple are specified: {wanted}")
    ((kind, given),) = wanted.items()
    return _constraint(kind, given)


def schema_constraint(schema: object) -> Constraint:
    """The constraint to JSON that a schema accepts."""
    return _satisfied(lambda seed: json_text(schema, seed))


def _satisfied(text: Constraint) -> Constraint:
    def satisfied(seed: bytes) -> str:
        try:
            return text(seed)
        except NoValue as error:
            raise bad_request(f"Grammar error: {error}") from error

    return satisfied


def _schema_of(response_format: dict[str, Any]) -> dict[str, Any]:
    told = response_format.get("json_schema")
    if told is None:
        message = "When response_format type is 'json_schema', the 'json_schema' field must be provided."
        raise bad_value(message, "response_format")
    schema = told.get("schema")
    return {} if schema is None else {"json": schema}


def _constraint(kind: str, given: Any) -> Constraint:
    match kind:
        case "json":
            return schema_constraint(_parsed(given) if isinstance(given, str) else given)
        case "choice":
            if not given:
                raise bad_request(f"Choice '{given}' cannot be an empty list")
            return lambda seed: str(Random(seed).choice(given))
        case "regex":
            return _satisfied(lambda _: text_for(given))
        case "json_object":
            if given is not True:
                message = "structured_outputs.json_object must be True if set; omit structured_outputs to disable"
                raise bad_request(f"{message} structured outputs")
            return schema_constraint(_ANY_OBJECT)
    raise bad_request(f"The simulated replica knows no {kind}; it has json, json_object, regex and choice.")


def _parsed(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise bad_request("Invalid JSON grammar specification.") from error
