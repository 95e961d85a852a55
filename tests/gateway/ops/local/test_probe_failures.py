"""What `kvgate up` learns of servers that do not answer as they should."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from gateway.ops.local.probes import ask_any_server, client, has_events
from tests.certificates import self_signed
from tests.programs import needs

pytestmark = needs("openssl")


async def test_a_server_that_wants_a_certificate_is_told_to_give_no_answer(tmp_path: Path) -> None:
    own = self_signed(tmp_path, "own", "127.0.0.1")
    wanting = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(own[0]))
    wanting.load_cert_chain(*own)
    wanting.verify_mode = ssl.CERT_REQUIRED
    trusting = ssl.create_default_context(cafile=str(own[0]))
    async with (
        await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=wanting) as server,
        client(trusting) as http,
    ):
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await has_events(http, url) is None
        assert "no answer on" in str((await ask_any_server(http, url)).problem)
