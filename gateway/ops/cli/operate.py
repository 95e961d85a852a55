"""Commands that operate a running cluster: drain, undrain, queue, budgets."""

from __future__ import annotations

import json
import threading
import time
from typing import Annotated, Any, cast
from urllib.parse import quote

import typer

from gateway.ops.cli.ask import NoAnswer, ask, gateway_url
from gateway.ops.cli.options import DEFAULT_STATE_DIR, ApiKey, AsJson, Gateway, StateDir
from gateway.ops.cli.printable import all_printable, printable
from gateway.ops.errors import CommandError

_LOOK_S = 0.5
_PATIENCE_S = 60.0
"""A gateway that restarts, or a failover of Redis, takes less."""

Replica = Annotated[str, typer.Argument(metavar="REPLICA", help="The replica's id.")]


def drain(
    replica: Replica,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when it has no request and its keys are forgotten.")
    ] = False,
    timeout_s: Annotated[float, typer.Option(min=0, help="With --wait: give up after so many seconds; 0: never.")] = 0,
    move: Annotated[bool, typer.Option("--move", help="Let its requests go on at other replicas, at once.")] = False,
    gateway: Gateway = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: ApiKey = None,
) -> None:
    """Take a replica out of service gently: no new requests, running ones finish.

    Then its keys are forgotten. It stays drained until `kvgate undrain`, or until
    its engine restarts. Requests that can go nowhere else (a stored response that
    is continued) still reach it. With --move, requests and streams that can go on
    at another replica do, within seconds; the others finish here. With --wait, the
    exit code is 1 if the time is over before its requests are.

    \b
    Examples:
      kvgate drain r0
      kvgate drain r0 --wait --timeout-s 600
      kvgate drain r0 --move --wait
      kvgate drain r0 --gateway http://10.0.0.7:8080
    """
    if timeout_s and not wait:
        raise CommandError("--timeout-s: is only for --wait; give that, too")
    replicas_url = f"{gateway_url(gateway, state_dir)}/v1/replicas"
    url = f"{replicas_url}/{quote(replica, safe='')}"
    answer = all_printable(ask("POST", f"{url}/drain{'?move=true' if move else ''}", api_key, "state"))
    if answer["state"] != "draining":
        typer.echo(f"{replica} is {answer['state']}; it gets no requests until its engine restarts, or kvgate undrain")
    elif not wait:
        typer.echo(f"{replica} gets no new requests; in flight: {answer['active_requests']}")
    replicas = ask("GET", replicas_url, api_key, "replicas")["replicas"]
    if not any(one["state"] == "ready" and one["pool"] == answer["pool"] for one in replicas):
        typer.echo(f"no replica of {answer['pool']} is ready now: requests get a 503, or are held", err=True)
    if wait:
        wait_until_drained(replica, url, api_key, timeout_s)


def wait_until_drained(replica: str, url: str, api_key: str | None, timeout_s: float, done: str = "is drained") -> None:
    """Waits until a replica has no request and no key. Says whenever the numbers have changed, and at the end that it
    is `done`. The keys of one that is dead or hangs are not waited for."""
    until_s, told = time.monotonic() + timeout_s, ""
    while True:
        answer = _ask_patiently(url, api_key)
        if answer["drained_since_ms"] is None:
            raise CommandError(f"{replica} is not drained any more: it is {answer['state']}, or has restarted")
        now = f"{replica}: {answer['active_requests']} requests in flight, {answer['keys']} keys"
        if now != told:
            typer.echo(now)
            told = now
        if not answer["active_requests"] and (answer["state"] != "draining" or not answer["keys"]):
            is_down = "" if answer["state"] == "draining" else f", and {answer['state']}"
            typer.echo(f"{replica} {done}{is_down}")
            return
        if timeout_s and time.monotonic() >= until_s:
            raise CommandError(f"{replica} still has work after {timeout_s:g} s; it goes on draining")
        threading.Event().wait(_LOOK_S)


def _ask_patiently(url: str, api_key: str | None) -> dict[str, Any]:
    """The gateway's answer. Raises CommandError after a minute without one."""
    until_s, has_told = time.monotonic() + _PATIENCE_S, False
    while True:
        try:
            return cast("dict[str, Any]", all_printable(ask("GET", url, api_key, "state")))
        except NoAnswer as error:
            if time.monotonic() >= until_s:
                raise
            if not has_told:
                typer.echo(f"{printable(str(error))}; trying again", err=True)
            has_told = True
        threading.Event().wait(_LOOK_S)


def undrain(
    replica: Replica,
    gateway: Gateway = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: ApiKey = None,
) -> None:
    """Let a drained replica have requests again.

    Its agent says again what it holds.

    \b
    Examples:
      kvgate undrain r0
    """
    url = f"{gateway_url(gateway, state_dir)}/v1/replicas/{quote(replica, safe='')}/undrain"
    answer = all_printable(ask("POST", url, api_key, "state"))
    typer.echo(f"{replica} is {answer['state']}")


def budgets(
    gateway: Gateway = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show what is spent of the budgets of tenants and API keys.

    An admin's key sees all of them, another key those of its tenant
    (docs/tenants.md).

    \b
    Examples:
      kvgate budgets
      kvgate budgets --json
    """
    answer: dict[str, Any] = ask("GET", f"{gateway_url(gateway, state_dir)}/v1/budgets", api_key, "budgets")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    if not answer["budgets"]:
        typer.echo("No budgets that your key may see.")
        return
    from gateway.ops.cli.tables import print_budgets

    print_budgets(answer)


def queue(
    gateway: Gateway = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Show who waits in the queue, since when, and why.

    A line for each tenant that waits, then the room of each replica. Requests wait
    if no replica that may serve them has room (docs/tenants.md).

    \b
    Examples:
      kvgate queue
      kvgate queue --gateway http://127.0.0.1:8080 --json
    """
    answer: dict[str, Any] = ask("GET", f"{gateway_url(gateway, state_dir)}/v1/queue", api_key, "pools")
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    from gateway.ops.cli.tables import print_queue

    for pool in answer["pools"]:
        print_queue(pool)
