"""Says what is wrong with a configuration, one line per mistake: the field, the mistake, the fix.

Values are quoted back only where no secret can stand: a URL may hold a password, and somebody will one day
paste a key where its digest belongs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_UNQUOTED_FIELDS = {"url", "sha256", "cache_salt_secret"}
_LONGEST_QUOTED_CHARS = 40

_EXPECTED = {
    "string_type": "must be text; put it in quotes",
    "int_type": "must be a whole number, without quotes",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number, without quotes",
    "bool_type": "must be true or false, without quotes",
    "list_type": "must be a list; start each item with '- '",
    "finite_number": "must be finite",
    "missing": "is missing; it has no default",
    "invalid_key": "is not text; keys are field names",
}
# pydantic's bounds, by the name under which the error's context carries them.
_BOUNDS = {
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must be at least {min_length} characters",
    "too_short": "must be at least {min_length} characters",
}
_PATTERNS = {
    r"^[a-z0-9._-]{1,48}$": "must be 1 to 48 of a-z, 0-9, '.', '_' and '-'",
    r"^[a-z0-9._-]{0,48}$": "must be at most 48 of a-z, 0-9, '.', '_' and '-'",
    r"^[0-9a-f]{64}$": "must be 64 lower-case hex digits; `kvgate hash-key` prints them",
    r"^/": "must start with /",
    r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$": "must be a name in Kubernetes: a-z, 0-9, '-' and '.'",
    r"^[^@]+$": "must be a model's name or folder, without @",
    r"^\d+\.\d+\.\d+\.\d+$": "must be an IPv4 address, like 127.0.0.1, or 0.0.0.0 for all interfaces",
    r"^[^/:\s]+$": "must be a host name alone, without scheme, port or path",
}


def read_yaml(text: str) -> tuple[dict[Any, Any] | None, list[str]]:
    """The mapping that `text` holds (None if it is not one) and the problems of its syntax.

    A key given twice is a problem here: YAML parsers keep the last one and say nothing.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "file"
        return None, [f"{where}: is not YAML: {error.problem}; check indentation and quotes"]
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        return None, [f"file: is not YAML: {' '.join(str(error).split())}"]
    if root is None or data is None:
        return {}, []
    if not isinstance(data, dict):
        return None, ["file: must be a mapping of field names to values, like 'port: 8080'"]
    return data, list(_duplicates(root, "", set()))


def _duplicates(node: yaml.Node, path: str, seen_nodes: set[int]) -> Iterator[str]:
    if id(node) in seen_nodes:  # an alias: looked at where its anchor stands
        return
    seen_nodes.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _duplicates(item, f"{path}[{index}]", seen_nodes)
    elif isinstance(node, yaml.MappingNode):
        first_line: dict[str, int] = {}
        for key, value in node.value:
            field = f"{path}.{key.value}" if path else str(key.value)
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in first_line:
                yield f"{field}: is given twice (lines {first_line[key.value]} and {line}); delete one"
            first_line.setdefault(str(key.value), line)
            yield from _duplicates(value, field, seen_nodes)


def explain(error: ValidationError, model: type[BaseModel], origins: Mapping[tuple[str, ...], str]) -> list[str]:
    """One line per mistake in `error`, which validating against `model` raised.

    `origins` names the environment variable that a field's value came from, where it did.
    """
    lines = []
    for detail in error.errors(include_url=False):
        location = detail["loc"]
        origin = origins.get(tuple(str(part) for part in location))
        field = _dotted(location) or "file"
        lines.append(f"{field}{f' (from {origin})' if origin else ''}: {_describe(detail, model)}")
    return lines


def _dotted(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _describe(detail: ErrorDetails, model: type[BaseModel]) -> str:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "extra_forbidden":
        return _unknown_key(detail["loc"], model)
    if kind == "value_error":
        return str(context["error"])
    if kind in ("model_type", "model_attributes_type"):
        return (
            "is empty; write its fields below it, indented, or leave it out"
            if value is None
            else f"must be a mapping of its fields, not {_quoted(value)}"
        )
    if kind == "literal_error":
        return f"{_got(detail)}must be one of {str(context['expected']).replace(' or ', ', ')}"
    if kind == "string_pattern_mismatch":
        return f"{_got(detail)}{_PATTERNS[context['pattern']]}"
    if kind in _BOUNDS:
        return f"{_got(detail)}{_BOUNDS[kind].format(**context)}"
    if kind in _EXPECTED:
        return _EXPECTED[kind] if kind in ("missing", "invalid_key") else f"{_got(detail)}{_EXPECTED[kind]}"
    return f"{_got(detail)}{detail['msg']}"


def _got(detail: ErrorDetails) -> str:
    if _UNQUOTED_FIELDS.intersection(str(part) for part in detail["loc"]):
        return ""
    return f"is {_quoted(detail['input'])}; "


def _quoted(value: object) -> str:
    if value is None:
        return "empty"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= _LONGEST_QUOTED_CHARS else text[: _LONGEST_QUOTED_CHARS - 1] + "…"


def _unknown_key(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    known = sorted(_section_at(model, location[:-1]).model_fields)
    near = get_close_matches(str(location[-1]), known, n=1, cutoff=0.6)
    return f"is not a known key; did you mean {near[0]}?" if near else f"is not a known key; known: {', '.join(known)}"


def _section_at(model: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel]:
    """The model of the mapping at `location`, found through list and optional annotations."""
    for part in location:
        if isinstance(part, str):
            annotation: Any = model.model_fields[part].annotation
            while arguments := get_args(annotation):
                annotation = arguments[0]
            model = annotation
    return model
