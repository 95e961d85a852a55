"""`kvgate watch`: the requests of all gateways as they end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from gateway.ops.cli.ask import NoAnswer, document_of, gateway_url, no_answer
from gateway.ops.cli.options import DEFAULT_STATE_DIR, ApiKey, Gateway, StateDir
from gateway.ops.cli.printable import printable
from gateway.ops.errors import CommandError

_HEADING = (
    "time  request id  gateway  status path  tenant  model  → replica why  "
    "tokens cached/predicted/all  ms waited, first byte, end"
)
_LONGEST_ID = 64
_SILENCE_S, _AGAIN_S, _PATIENCE_S = 30.0, 1.0, 60.0

Only = Annotated[str | None, typer.Option(help="Only those of this one.")]


def watch(
    tenant: Only = None,
    model: Only = None,
    replica: Only = None,
    request_id: Annotated[str | None, typer.Option(help="Only this request: the x-request-id of its answer.")] = None,
    gateway: Gateway = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each record as a line of JSON.")] = False,
) -> None:
    """Follow the requests of all gateways as they end, until Ctrl-C.

    A line for each: when, its id, its gateway, status and path, its tenant and
    model, its replica and why it went there, prompt tokens (cached/predicted/all),
    how long it waited for room, its first byte and its end in ms. Never a prompt.
    prefill=r1: r1 computed its prompt. hedged=r1: r1 was late. resumed=r1: r1 broke the answer off, which went on
    here. broken=r1: r1 broke it off, and it did not go on.
    Of more than 100 requests a second at one gateway, the rest is counted only.

    \b
    Examples:
      kvgate watch
      kvgate watch --tenant research --json | jq -c 'select(.status >= 500)'
    """
    wanted = {"tenant": tenant, "model": model, "replica": replica, "request_id": request_id}
    query = urlencode({name: value for name, value in wanted.items() if value is not None})
    url = f"{gateway_url(gateway, state_dir)}/v1/decisions?{query}"
    if not as_json:
        typer.echo(_HEADING, err=True)
    with suppress(KeyboardInterrupt):
        for event, data in watched(url, api_key):
            if event == "dropped":
                typer.echo(f"{data} more were not shown", err=True)
            elif event == "trouble":
                typer.echo(data or "records come again", err=True)
            else:
                typer.echo(json.dumps(data) if as_json else line_of(data))


def watched(url: str, api_key: str | None) -> Iterator[tuple[str, Any]]:
    """The events of the gateway, again and again: it may restart. Raises CommandError if it refuses, or is away for a
    minute."""
    import httpx

    from coordinator.engine.sockets import tls_context

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    last_s, has_told = time.monotonic(), False
    with httpx.Client(timeout=_SILENCE_S, headers=headers, trust_env=False, verify=tls_context()) as client:
        while True:
            try:
                with client.stream("GET", url) as response:
                    if not response.headers.get("content-type", "").startswith("text/event-stream"):
                        response.read()
                        document_of(response)
                        raise CommandError(f"{url.partition('?')[0]} does not answer like a gateway")
                    has_told = False
                    for event in parsed_events(response.iter_lines()):
                        last_s = time.monotonic()
                        yield event
                last_s = time.monotonic()
            except (httpx.HTTPError, httpx.InvalidURL, NoAnswer) as error:
                why = str(error) if isinstance(error, NoAnswer) else no_answer(url.partition("?")[0], error)
                if time.monotonic() >= last_s + _PATIENCE_S:
                    raise CommandError(why) from None
                if not has_told:
                    yield "trouble", f"{why}; trying again"
                has_told = True
            threading.Event().wait(_AGAIN_S)


def parsed_events(lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The events in a stream, each with its data; the name of a record is empty."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))
            name = ""


def _shown_id(request_id: str) -> str:
    """One short word: ids are their clients', and must not look like other fields, or push them away."""
    word = "_".join(request_id.split()) or "-"
    return word if len(word) <= _LONGEST_ID else word[: _LONGEST_ID - 1] + "…"


def _marks(record: dict[str, Any]) -> Iterator[str]:
    """The replicas that it had before this one: too late with the first byte, or they broke the answer off."""
    if record.get("hedged"):
        yield f"hedged={record['hedged']}"
    if record.get("prefill"):
        yield f"prefill={record['prefill']}"
    for left in record.get("resumed") or ():
        yield f"{'broken' if left['how'] == 'none' else 'resumed'}={left['replica']}"


def line_of(record: dict[str, Any]) -> str:
    """A record as a line for people. Its id stands before what a narrow terminal may cut off."""

    def told(name: str) -> str:
        value = record.get(name)
        return "-" if value is None else f"{value:.0f}" if isinstance(value, float) else str(value)

    tokens = "/".join(map(told, ("cached_tokens", "matched_tokens", "prompt_tokens")))
    times = f"waited {told('waited_ms')} first {told('first_byte_ms')} end {told('duration_ms')} ms"
    status = " ".join(filter(None, (told("status"), record.get("code"))))
    names = told("gateway"), f"{status} {told('path')}", told("tenant"), told("model")
    placed = (
        " ".join((f"→ {told('replica')} {told('why')}", *_marks(record))) if record.get("replica") else "not placed"
    )
    line = "  ".join((str(record.get("time", ""))[11:23], _shown_id(told("request_id")), *names, placed, tokens, times))
    return printable(line)
