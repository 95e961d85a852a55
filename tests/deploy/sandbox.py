"""A program that runs a cluster's processes in their own network and mount namespaces, and sends them requests.

    unshare --net --mount python tests/deploy/sandbox.py < plan.json

In the namespaces the manifests' ports are free, host names resolve as in a cluster, and the files of a service account
are where pods have them. All ports are on one address, so a second replica needs other ports.

The plan has processes, and questions in their order. A question may `start` a process, `run` a command, or send a
request. `until` repeats it until the answer has that status and text. A question with a `name` goes on beside the next
ones: `read` waits until a text is in its answer, and `end` reads it to the end.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_WITHIN_S = 40.0


def main() -> None:
    plan = json.load(sys.stdin)
    _raise_loopback()
    _name(plan["names"], Path(plan["folder"]))
    _give_account(Path(plan["account"]))
    with ExitStack() as stack:
        begun = [name for name in plan["processes"] if name not in {each.get("start") for each in plan["questions"]}]
        running = {name: _start(stack, name, plan["processes"][name], Path(plan["folder"])) for name in begun}
        with httpx.Client(timeout=30) as http:
            aside: dict[str, _Aside] = {}

            def step(question: dict[str, Any]) -> dict[str, Any]:
                if name := question.get("start"):
                    running[name] = _start(stack, name, plan["processes"][name], Path(plan["folder"]))
                elif name := question.get("name"):
                    aside[name] = _Aside(http, question)
                elif name := question.get("read"):
                    return aside[name].read(question["text"])
                elif name := question.get("end"):
                    return aside[name].end()
                else:
                    return _ask(http, running, question)
                return {}

            answers = [step(question) for question in plan["questions"]]
        exits = {name: _end(process) for name, process in reversed(running.items())}
    json.dump({"answers": answers, "exits": exits}, sys.stdout)


def _raise_loopback() -> None:
    with socket.socket() as any_socket:
        request = struct.pack("16sh", b"lo", 0)
        (flags,) = struct.unpack("16xh", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags | _IFF_UP))


def _name(names: list[str], folder: Path) -> None:
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {' '.join(names)}\n")
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)


def _give_account(files: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/var/run"], check=True)
    shutil.copytree(files, "/var/run/secrets/kubernetes.io/serviceaccount")


def _start(stack: ExitStack, name: str, process: dict[str, Any], folder: Path) -> subprocess.Popen[bytes]:
    log = stack.enter_context((folder / f"{name}.log").open("wb"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    started = subprocess.Popen(process["argv"], env=environment | process["env"], stdout=log, stderr=log)
    stack.callback(started.wait)
    stack.callback(started.kill)
    return started


class _Aside:
    """A request whose answer comes while others are asked."""

    def __init__(self, http: httpx.Client, question: dict[str, Any]) -> None:
        self._found: dict[str, Any] = {"status": 0, "headers": {}, "body": ""}
        self._news = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, args=(http, question), daemon=True)
        self._thread.start()

    def _run(self, http: httpx.Client, question: dict[str, Any]) -> None:
        try:
            asked = {name: question.get(name) for name in ("json", "headers")}
            with http.stream(question["method"], question["url"], timeout=None, **asked) as response:
                self._tell(status=response.status_code, headers=dict(response.headers))
                for text in response.iter_text():
                    self._tell(body=self._found["body"] + text)
        except httpx.TransportError as error:
            self._tell(error=str(error))
        with self._news:
            self._is_over = True
            self._news.notify_all()

    def _tell(self, **fields: Any) -> None:
        with self._news:
            self._found |= fields
            self._news.notify_all()

    def read(self, text: str) -> dict[str, Any]:
        """The answer so far, when `text` has come; and whether it is over."""
        with self._news:
            self._news.wait_for(lambda: text in self._found["body"] or self._is_over, _WITHIN_S)
            return self._found | {"is_over": self._is_over}

    def end(self) -> dict[str, Any]:
        """The whole answer."""
        self._thread.join(_WITHIN_S)
        return self.read("")


def _ask(http: httpx.Client, running: dict[str, subprocess.Popen[bytes]], question: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request or a command. With `until`, asks again until the answer has that status and text."""

    def answer() -> dict[str, Any]:
        if "run" in question:
            done = subprocess.run(question["run"], capture_output=True, text=True, check=False)
            return {"status": done.returncode, "body": done.stdout + done.stderr}
        try:
            response = http.request(question["method"], question["url"], json=question.get("json"))
        except httpx.TransportError as error:
            return {"status": 0, "body": str(error)}
        return {"status": response.status_code, "headers": dict(response.headers), "body": response.text}

    def is_it(found: dict[str, Any]) -> bool:
        status, text = question["until"]
        return found["status"] == status and text in found["body"]

    return _eventually(answer, is_it, running) if "until" in question else answer()


def _eventually(
    answer: Callable[[], dict[str, Any]],
    is_it: Callable[[dict[str, Any]], bool],
    running: dict[str, subprocess.Popen[bytes]],
) -> dict[str, Any]:
    deadline = time.monotonic() + _WITHIN_S
    while not is_it(found := answer()):
        ended = [name for name, process in running.items() if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            sys.exit(f"{', '.join(ended) or 'nothing'} ended; the last answer: {found}")
        signal.sigtimedwait([], 0.1)
    return found


def _end(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(20)


if __name__ == "__main__":
    main()
