"""`kvgate top`: replicas, gateways, queue and the last decisions in a terminal, live."""

from __future__ import annotations

import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.ops.cli.ask import NoAnswer, ask, gateway_url
from gateway.ops.cli.options import DEFAULT_STATE_DIR, ApiKey, Gateway, StateDir
from gateway.ops.cli.watch import watched
from gateway.ops.errors import CommandError

if TYPE_CHECKING:
    from gateway.ops.cli.top_view import Tally


class By(StrEnum):
    """What replicas are sorted by."""

    name = "name"
    requests = "requests"
    rate = "rate"
    cached = "cached"
    keys = "keys"


def top(
    sort: Annotated[By, typer.Option(help="What replicas are sorted by.")] = By.name,
    interval_s: Annotated[float, typer.Option(min=0.2, help="How often it is drawn anew.")] = 1.0,
    gateway: Gateway = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: ApiKey = None,
) -> None:
    """Show the cluster in a terminal, live, until q or Ctrl-C.

    Replicas with their load and room, gateways, who waits, and the last decisions.
    Rates, failures (status 500 and more), the share of prompt tokens from caches and
    the median of first bytes are of the last 30 s. Any gateway shows the whole
    cluster. If the output is no terminal, it is printed once, after a few seconds.

    \b
    Examples:
      kvgate top
      kvgate top --sort cached --gateway http://10.0.0.7:8080
    """
    url = gateway_url(gateway, state_dir)
    seen = _seen(url, api_key)  # a mistake ends the command here

    from rich.console import Console
    from rich.live import Live

    from gateway.ops.cli.top_view import Tally, view

    tally = Tally(time.monotonic())
    threading.Thread(target=_read, args=(url, api_key, tally), daemon=True).start()
    if not sys.stdout.isatty():
        threading.Event().wait(3 * interval_s)
        Console(width=200, highlight=False).print(view(_seen(url, api_key), tally, sort, time.monotonic()))
        return
    first = view(seen, tally, sort, time.monotonic())
    with suppress(KeyboardInterrupt), _keys() as key_within, Live(first, screen=True, auto_refresh=False) as live:
        while key_within(interval_s) not in ("q", "Q"):
            try:
                seen, tally.problem = _seen(url, api_key), ""
            except NoAnswer as error:
                tally.problem = str(error)
            live.update(view(seen, tally, sort, time.monotonic()), refresh=True)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Gives a function that waits so many seconds for a key, and returns it; empty if none came, q if none can come any
    more. Keys count at once, not only with the end of a line."""
    if not sys.stdin.isatty():
        yield _nothing_after
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield lambda seconds: sys.stdin.read(1) or "q" if select.select([sys.stdin], [], [], seconds)[0] else ""
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _nothing_after(seconds: float) -> str:
    threading.Event().wait(seconds)
    return ""


def _read(url: str, api_key: str | None, tally: Tally) -> None:
    try:
        for event, data in watched(f"{url}/v1/decisions", api_key):
            tally.take(event, data, time.monotonic())
    except CommandError as error:
        tally.trouble = f"no decisions: {error}"


def _seen(url: str, api_key: str | None) -> dict[str, Any]:
    """What the gateway tells of the whole cluster now."""
    queue = ask("GET", f"{url}/v1/queue", api_key, "pools")
    return {"pools": queue["pools"], "replicas": ask("GET", f"{url}/v1/replicas", api_key, "replicas")["replicas"]}
