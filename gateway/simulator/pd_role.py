"""A server's role, prefill or decode, which changes while it runs.

This is vLLM's runtime role switching: a text and a prototype (RFC vLLM #56133), in no release up to 0.33. A server
takes only requests that name its role and its epoch, and refuses others with a 409 before anything of them is executed.
To change the role, it takes none, waits until those that it has are over and other servers have taken the KV blocks
that it keeps for them, and then begins the next epoch. If that takes too long, it keeps its role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gateway.simulator.errors import RequestRefused
from gateway.simulator.nixl import Nixl
from gateway.simulator.settings import PD_ROLES
from gateway.tasks import Tasks

_PATHS = ("/v1/completions", "/v1/chat/completions")
_WITHOUT_ROLE = ("/tokenize", "/detokenize")
_DIRECTIONS = ("do_remote_decode", "do_remote_prefill")


class PdRole:
    def __init__(self, role: str, nixl: Nixl, tasks: Tasks) -> None:
        self._role, self._nixl, self._tasks = role, nixl, tasks
        self._epoch, self._phase, self._target, self._error = 0, "ready", "", ""
        self._active, self._is_idle = 0, asyncio.Event()
        nixl.on_unpinned = self._note

    def status(self) -> dict[str, Any]:
        return {
            "role": self._role,
            "epoch": self._epoch,
            "phase": self._phase,
            "target_role": self._target or None,
            "active_requests": self._active,
            "error": self._error or None,
        }

    def switch(self, told: Mapping[str, Any]) -> None:
        """Raises a 400, or a 409 if it does not fit to what the server does."""
        role, epoch, timeout_s = told.get("role"), told.get("expected_epoch"), told.get("drain_timeout", 120)
        if role not in PD_ROLES or type(epoch) is not int or not isinstance(timeout_s, int | float):
            raise RequestRefused(422, "role, expected_epoch, drain_timeout")
        if self._phase != "ready":
            raise RequestRefused(409, "A role transition is already in progress or failed")
        if role == self._role and epoch in (self._epoch, self._epoch - 1):
            return
        if epoch != self._epoch:
            raise RequestRefused(409, "Stale role epoch")
        self._phase, self._target, self._error = "draining", role, ""
        self._tasks.spawn(self._drained(role, timeout_s), "a change of the role")

    async def _drained(self, role: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                self._note()
                await self._is_idle.wait()
        except TimeoutError as error:
            self._error = repr(error)
        else:
            self._role, self._epoch = role, self._epoch + 1
        self._phase = "ready"

    def _note(self) -> None:
        self._is_idle.clear()
        if not self._active and not self._nixl.num_pinned:
            self._is_idle.set()

    def refusal(self, path: str, headers: Mapping[str, str]) -> dict[str, Any] | None:
        """The body of a 409; None if it takes the request."""
        if path in _WITHOUT_ROLE:
            return None
        if path not in _PATHS:
            return {"error": "This endpoint is unsupported with runtime P/D switching"}
        asked = headers.get("X-vLLM-PD-Role"), headers.get("X-vLLM-PD-Epoch")
        if self._phase == "ready" and asked == (self._role, str(self._epoch)):
            return None
        return {"error": "P/D admission rejected", **self.status()}

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Around a request that it takes."""
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            self._note()

    def check(self, path: str, asked: Mapping[str, Any]) -> None:
        """Raises a 500 if the engine does not do what a request asks for: compute a prompt for another server, or take
        one that another server has computed."""
        directions = [role for role, name in zip(PD_ROLES, _DIRECTIONS, strict=True) if asked.get(name)]
        if path in _PATHS and directions != [self._role]:
            raise RequestRefused(500, "Internal server error")
