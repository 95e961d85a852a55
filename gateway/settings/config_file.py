"""From a YAML file and some variables of the environment to a checked settings object, whatever its model.

Every mistake gets one line: the field, the mistake, the fix. The line quotes a value only if it cannot be a secret: a
URL may hold a password, and users paste a key where its digest belongs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Settings = TypeVar("Settings", bound=BaseModel)

_UNQUOTED_FIELDS = {"url", "sha256", "cache_salt_secret", "replica_api_key"}
_LONGEST_QUOTED_CHARS = 40

# By pydantic's kind of error, with the values of its context.
_WITHOUT_VALUE = {"missing": "is missing; it has no default", "invalid_key": "is not text; keys are field names"}
_EXPECTED = {
    "string_type": "must be text; put it in quotes",
    "int_type": "must be a whole number, without quotes",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number, without quotes",
    "bool_type": "must be true or false, without quotes",
    "list_type": "must be a list; start each item with '- '",
    "finite_number": "must be finite",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must be at least {min_length} characters",
    "too_short": "must be at least {min_length} long",
    "too_long": "must be at most {max_length} long",
}
_PATTERNS = {
    r"^[a-z0-9._-]{1,48}$": "must be 1 to 48 of a-z, 0-9, '.', '_' and '-'",
    r"^[a-z0-9._-]{0,48}$": "must be at most 48 of a-z, 0-9, '.', '_' and '-'",
    r"^[0-9a-f]{64}$": "must be 64 lower-case hex digits; `kvgate hash-key` prints them",
    r"^[A-Za-z0-9._/-]{1,63}$": "must be 1 to 63 of a-z, A-Z, 0-9, '.', '_', '/' and '-'",
    r"^/": "must start with /",
    r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$": "must be a name in Kubernetes: a-z, 0-9, '-' and '.'",
    r"^[^@]+$": "must be a model's name or folder, without @",
    r"^\d+\.\d+\.\d+\.\d+$": "must be an IPv4 address, like 127.0.0.1, or 0.0.0.0 for all interfaces",
    r"^[^/:\s]+$": "must be a host name alone, without scheme, port or path",
}


class SettingsError(Exception):
    """A configuration that cannot be used. `problems` has a line for each mistake, with its field."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems

    def listed(self) -> str:
        """The number of problems, then a line for each."""
        count = len(self.problems)
        return f"{count} problem{'' if count == 1 else 's'}" + "".join(f"\n  {problem}" for problem in self.problems)


def read_file(path: Path) -> tuple[dict[Any, Any], list[str]]:
    """The mapping in a YAML file, and its keys that are given twice. SettingsError if the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SettingsError([f"cannot be read ({why}); give a YAML file"]) from error
    data, problems = _read_yaml(text)
    if data is None:
        raise SettingsError(problems)
    return data, problems


def merged(data: dict[Any, Any], over: dict[Any, Any]) -> dict[Any, Any]:
    """`data` with what `over` says. Sections are merged field by field, lists are not."""
    both = {**data, **over}
    for name, section in data.items():
        if isinstance(section, dict) and isinstance(over.get(name), dict):
            both[name] = merged(section, over[name])
    return both


def build(
    model: type[Settings],
    data: dict[Any, Any],
    env: Mapping[str, str],
    overrides: Mapping[str, tuple[str, ...]],
    known_problems: list[str] | None = None,
) -> Settings:
    """A `model` built from `data` and the variables in `env`; `overrides` has the field that each variable overrides.

    An empty variable overrides nothing. Raises SettingsError with `known_problems` and every problem found here.
    """
    problems = known_problems or []
    overridden = {name: field for name, field in overrides.items() if env.get(name)}
    told: Any = data
    for name, field in overridden.items():
        told = _with(told, field, env[name])
    try:
        settings = model.model_validate(told)
    except ValidationError as error:
        origins = {field: name for name, field in overridden.items()}
        raise SettingsError(problems + _explain(error, model, origins)) from None
    if problems:
        raise SettingsError(problems)
    return settings


def _with(section: Any, field: tuple[str, ...], value: str) -> Any:
    """A copy of `section` in which `field` is `value`. What is no mapping is returned as it is, to be refused."""
    if not field:
        return value
    if not isinstance(section, dict):
        return section
    first, *rest = field
    return {**section, first: _with(section.get(first, {}), tuple(rest), value)}


def _read_yaml(text: str) -> tuple[dict[Any, Any] | None, list[str]]:
    """The mapping in `text` (None if it is none), and the problems of its syntax.

    A key that is given twice is such a problem: YAML parsers silently keep the last one.
    """
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        problems = list(_duplicates(root, "", set())) if root else []
        data = loader.construct_document(root) if root else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "file"
        what = str(error.problem).partition("'")[0].strip()  # it may quote a secret
        return None, [f"{where}: is not YAML: {what}; check indentation and quotes"]
    except Exception as error:  # of texts that are no YAML, and of values of its types that do not exist
        return None, [f"file: is not YAML ({type(error).__name__})"]
    if data is None:
        return {}, []
    if not isinstance(data, dict):
        return None, ["file: must be a mapping of field names to values, like 'port: 8080'"]
    return data, problems


def _duplicates(node: yaml.Node, path: str, seen_nodes: set[int]) -> Iterator[str]:
    if id(node) in seen_nodes:  # an alias of a node that was checked at its anchor
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


def _explain(error: ValidationError, model: type[BaseModel], origins: Mapping[tuple[str, ...], str]) -> list[str]:
    """A line for each mistake in `error`, which the validation of `model` raised.

    `origins` has the environment variable of each field whose value came from one.
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
    if kind in _WITHOUT_VALUE:
        return _WITHOUT_VALUE[kind]
    return _got(detail) + (_EXPECTED[kind].format(**context) if kind in _EXPECTED else detail["msg"])


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
    """The model of the mapping at `location`. It may be the item of a list, or optional."""
    for part in location:
        if isinstance(part, str):
            annotation: Any = model.model_fields[part].annotation
            while arguments := get_args(annotation):
                annotation = arguments[0]
            model = annotation
    return model
