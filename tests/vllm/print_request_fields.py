"""Prints every field that vLLM's own request models have; test_request_fields.py runs this with vLLM's Python.

The last line is a JSON list of objects: `path` (of the API), `model` (the class), `field` (its name in a body; inside a
nested model, with the name of the field that holds the model: `stream_options.include_usage`), `type`, and
`description`, which may be empty.

It skips the types of other packages (the messages of OpenAI's SDK): they are public APIs, and vLLM declares its
additions to them in its own types. It does not find fields that a validator reads from a body without a declaration.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from fastapi import APIRouter
from fastapi.routing import APIRoute
from pydantic import AliasChoices, BaseModel
from typing_extensions import get_type_hints, is_typeddict
from vllm import entrypoints


class Field(NamedTuple):
    name: str
    annotation: Any
    description: str = ""


def bodies() -> Iterator[tuple[str, Any]]:
    """Each path that takes a body, with the body's type. They come from vLLM's routers and not from a server, because a
    server's routers depend on its model and flags."""
    for module in pkgutil.walk_packages(entrypoints.__path__, f"{entrypoints.__name__}."):
        if not module.name.endswith(".api_router"):
            continue
        for router in vars(importlib.import_module(module.name)).values():
            for route in router.routes if isinstance(router, APIRouter) else ():
                for parameter in route.dependant.body_params if isinstance(route, APIRoute) else ():
                    yield route.path, parameter.field_info.annotation


def models_in(annotation: Any) -> Iterator[type]:
    """vLLM's own classes in a type, at any depth of unions and lists."""
    if getattr(annotation, "__module__", "").startswith("vllm."):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def fields_of(model: type) -> Iterator[Field]:
    """The fields of a model, a dataclass or a typed dictionary that a client may set. Other types have none."""
    if is_typeddict(model):
        yield from (Field(name, hint) for name, hint in get_type_hints(model, include_extras=True).items())
    elif dataclasses.is_dataclass(model):
        hints = get_type_hints(model, include_extras=True)
        yield from (Field(field.name, hints[field.name]) for field in dataclasses.fields(model) if field.init)
    elif isinstance(model, type) and issubclass(model, BaseModel):
        for name, info in model.model_fields.items():
            alias = info.validation_alias
            aliases = alias.choices if isinstance(alias, AliasChoices) else [alias]
            for spelling in {name, *(one for one in aliases if isinstance(one, str))}:
                yield Field(spelling, info.annotation, info.description or "")


def rows_of(
    path: str, annotation: Any, holder: str = "", inside: frozenset[type] = frozenset()
) -> Iterator[dict[str, str]]:
    """The fields of a body and of the models in it. `holder` is the name of the field that holds them."""
    for model in set(models_in(annotation)) - inside:
        for field in fields_of(model):
            yield {
                "path": path,
                "model": model.__name__,
                "field": f"{holder}.{field.name}" if holder else field.name,
                "type": str(field.annotation),
                "description": field.description,
            }
            yield from rows_of(path, field.annotation, field.name, inside | {model})


if __name__ == "__main__":
    print(json.dumps([row for path, annotation in bodies() for row in rows_of(path, annotation)]))
