"""The way of a batch of spans to the backend, over HTTP/1.1.

It is that of requests to replicas (gateway/upstream): its code is in the CPU's caches, and nothing has to be imported.
Each batch has its own connection. Backends close idle ones, and nobody knows whether they have taken what was sent on
one just then.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from coordinator.engine.sockets import tls_context
from gateway.upstream import Upstream, UpstreamError

SENDS_WITHIN_S = 5.0
_READS_WITHIN_S = 1.0
_MOST_ANSWER_BYTES = 65_536
_REASONS = {"reset": "the connection broke", "protocol": "the answer is not HTTP"}


class NotSent(Exception):
    """A batch was not taken. `reason` has no text of the backend."""

    def __init__(self, reason: str, is_final: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_final = is_final
        """To send it again would not help, or the backend may have it."""


async def post(url: str, trusts: ssl.SSLContext | None, headers: Mapping[str, str], body: bytes) -> int:
    """Send a batch to a URL, with these headers, and return the status of the answer. Who has no context trusts the
    system's authorities. Raises NotSent."""
    target = "/" if urlsplit(url).path[-1:] in ("", "/") else ""
    upstream = Upstream(SENDS_WITHIN_S, None, lambda: trusts or tls_context())
    try:
        async with asyncio.timeout(SENDS_WITHIN_S):
            answer = await upstream.send("POST", url, target, headers, [body])
        with suppress(UpstreamError, TimeoutError):  # to hang up earlier would be an error for the backend
            async with asyncio.timeout(_READS_WITHIN_S):
                await answer.gathered(_MOST_ANSWER_BYTES, lambda _size_bytes: True)
        return answer.status
    except TimeoutError:
        raise NotSent(f"no answer within {SENDS_WITHIN_S:g} s", is_final=True) from None
    except UpstreamError as error:  # who got no connection tries again; otherwise the backend may have the batch
        is_refused = error.reason == "refused"
        why = error.detail if is_refused else _REASONS.get(error.reason, error.reason)
        raise NotSent(why, is_final=not is_refused) from None
    finally:
        await upstream.close()
