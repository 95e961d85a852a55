"""`kvgate up` itself: shows a cluster while it starts, runs and stops."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape

from gateway.ops.cli.printable import printable
from gateway.ops.local.cluster import LocalCluster
from gateway.ops.local.demo import DemoRequest, KeyWantedError, first_model, send_requests
from gateway.ops.local.plan import Plan
from gateway.ops.local.state_dir import Cluster

# A prompt of many blocks: an engine always computes a prompt's last block again, so one block could never match.
_PROMPT = "$(seq -s ' ' 500)"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KEY = "KVGATE_API_KEY"
Key = Literal["set", "wanted"] | None
"""Whether requests need an API key: it is set, or it is wanted. None: they need none."""


async def run(plan: Plan, env: Mapping[str, str], with_demo: bool) -> None:
    """Start the plan's cluster and stay until a signal asks to stop. With `detach`, return when it can serve."""
    console = Console(highlight=False, soft_wrap=True)
    cluster = LocalCluster(plan, env, say=lambda text: console.print(text, markup=False))
    _cancel_on_signals()
    ready = False
    try:
        layout = await cluster.start()
        ready = True
        _show_layout(console, layout, plan)
        model, key = await _ask_first(console, layout, plan, env, with_demo)
        if plan.detach:
            console.print(f"send it a request with:\n{_request(layout, model or 'MODEL', key)}", markup=False)
            return
        _show_next_steps(console, layout, model or "MODEL", plan.state_dir, key)
        async for line in cluster.news():
            console.print(line, markup=False)
    except asyncio.CancelledError:
        console.print("stopping …")
        if not ready:
            raise SystemExit(130) from None
    finally:
        if not (plan.detach and ready):
            began_s = time.monotonic()
            if (stopped := await cluster.stop()).running:
                console.print(f"{stopped} in {time.monotonic() - began_s:.1f} s")


async def _ask_first(
    console: Console, layout: Cluster, plan: Plan, env: Mapping[str, str], with_demo: bool
) -> tuple[str | None, Key]:
    """Sends the first requests. Returns a model's name, if one is known, and whether requests need a key."""
    key, sends = env.get(_KEY) or None, with_demo and not plan.detach
    needs: Key = "set" if key else None
    why_not = "no replica lists a model"
    try:
        model = await first_model(layout.url, key)
    except KeyWantedError:
        found = f"{_KEY} is none of this cluster's API keys" if key else "this cluster asks for API keys"
        why_not = f"{found}, and only their hashes are known here. Set {_KEY} to one of them, an admin's to see all"
        needs = "wanted"
        model = await first_model(layout.replicas[0].url, env.get("KVGATE_REPLICA_API_KEY"), is_gateway=False)
    if model is None or needs == "wanted":
        console.print(f"\n[yellow]no request was sent[/]: {why_not}" if sends else f"[yellow]{why_not}[/]")
        return model, needs
    if sends:
        console.print("\n[bold]Two requests, each sent to two gateways[/]")
        async for request in send_requests(layout, model, key):
            console.print(_line_of(request))
    return model, needs


def _cancel_on_signals() -> None:
    """Let the first signal cancel this task. Later signals are ignored, so that they cannot interrupt the stopping."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        for number in _SIGNALS:
            loop.add_signal_handler(number, lambda: None)
        task.cancel()

    for number in _SIGNALS:
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup is respected
            loop.add_signal_handler(number, interrupt)


def _show_layout(console: Console, layout: Cluster, plan: Plan) -> None:
    for kind, members in (("replica", layout.replicas), ("gateway", layout.gateways)):
        for member in members:
            pid = f", pid {member.pid}" if member.pid else ""
            console.print(f"{kind} {member.id} on {member.url}{pid}", markup=False)
    logs = escape(str(plan.state_dir / "logs"))
    console.print(f"[bold green]ready[/]: {layout.url} is shared by all gateways; logs are in {logs}")
    if plan.detach:
        console.print(f"see it in a browser: {layout.url}/console", markup=False)
        console.print(f"stop it with: {_shown(sys.argv[0])} down --state-dir {plan.state_dir}", markup=False)


def _shown(program: str) -> str:
    """How to type a program's name here: relative to this folder if it lies below it."""
    path = Path(program)
    return os.path.relpath(path) if path.is_absolute() and path.is_relative_to(Path.cwd()) else str(path)


def _line_of(request: DemoRequest) -> str:
    head = f"  {request.what:5} via {request.gateway}"
    if request.problem is not None:
        return f"{head} [yellow]failed[/]: {escape(printable(request.problem))}"
    where = f"{request.replica}, {request.matched_tokens} tokens matched, {request.decision}"
    if not request.replica:
        where = "answered (where and why, only an admin's key is told)"
    return f"{head} → [cyan]{escape(printable(where))}[/]\n        {escape(printable(request.answer))}"


def _in_double_quotes(text: str) -> str:
    """Quotes text for a shell, which replaces _PROMPT by its output."""
    escaped = (re.sub(r'([\\"$`])', r"\\\1", part) for part in text.split(_PROMPT))
    return f'"{_PROMPT.join(escaped)}"'


def _request(layout: Cluster, model: str, key: Key) -> str:
    """How to send a request, for a shell."""
    export = f"  export {_KEY}=YOUR_KEY\n" if key == "wanted" else ""
    bearer = f' -H "Authorization: Bearer ${_KEY}"' if key else ""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": _PROMPT}]})
    return f"""\
{export}  curl -si {layout.url}/v1/chat/completions -H 'content-type: application/json'{bearer} \\
    -d {_in_double_quotes(body)}"""


def _show_next_steps(console: Console, layout: Cluster, model: str, state_dir: Path, key: Key) -> None:
    option = f"--state-dir {state_dir}"
    python, kvgate = _shown(sys.executable), _shown(sys.argv[0])
    of_environment = f'os.environ["{_KEY}"]' if key else '"none"'
    sdk = f'openai.OpenAI(base_url="{layout.url}/v1", api_key={of_environment})'
    listing = f"  {python} -c 'import openai{', os' if key else ''}; print({sdk}.models.list())'\n"
    openai = listing if find_spec("openai") else ""
    steps = f"""
Try next
  open {layout.url}/console in a browser: the cluster on one page, live
{_request(layout, model, key)}
{openai}  {kvgate} status {option}
  {kvgate} owners {option} --model {model} --text {_in_double_quotes(_PROMPT)}
Ctrl-C stops everything.
"""
    console.print(steps, markup=False)
