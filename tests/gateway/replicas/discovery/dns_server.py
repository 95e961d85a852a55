"""A DNS server for tests, over UDP and TCP. The test decides its answers and whether it answers."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from gateway.ops.local.ports import free_ports

_UDP_BYTES = 512


class DnsServer:
    """`records` holds each name's records, as in a zone file: {"vllm.test.": ["A 10.0.0.1", "A 10.0.0.2"]}."""

    def __init__(self) -> None:
        self.records: dict[str, list[str]] = {}
        self.fault = ""
        """`silent` or `servfail`; empty if the server answers."""
        self.asked = 0
        self.asked_over_tcp = 0
        self.address = ""
        self.on_answer: Callable[[], None] = lambda: None

    def reply(self, wire: bytes, longest: int) -> bytes | None:
        query = dns.message.from_wire(wire)
        question = query.question[0]
        self.asked += 1
        if self.fault == "silent":
            return None
        answer = dns.message.make_response(query, recursion_available=True)
        known = self.records.get(str(question.name))
        if self.fault == "servfail":
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif known is None:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        else:
            kind = dns.rdatatype.to_text(question.rdtype)
            data = [record.removeprefix(f"{kind} ") for record in known if record.startswith(f"{kind} ")]
            if data:
                answer.answer.append(dns.rrset.from_text_list(question.name, 5, "IN", kind, data))
        reply = answer.to_wire()
        if len(reply) > longest:
            answer.answer.clear()
            answer.flags |= dns.flags.TC
            reply = answer.to_wire()
        return reply


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        reply = self._server.reply(data, _UDP_BYTES)
        if reply is not None:
            self._transport.sendto(reply, addr)
            self._server.on_answer()


@asynccontextmanager
async def running_dns() -> AsyncIterator[DnsServer]:
    server, loop = DnsServer(), asyncio.get_running_loop()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                size = struct.unpack("!H", await reader.readexactly(2))[0]
                server.asked_over_tcp += 1
                reply = server.reply(await reader.readexactly(size), 65_535)
                if reply is not None:
                    writer.write(struct.pack("!H", len(reply)) + reply)
        writer.close()

    port = free_ports(1)[0]
    streams = await asyncio.start_server(connected, "127.0.0.1", port)
    datagrams, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(server), ("127.0.0.1", port))
    server.address = f"127.0.0.1:{port}"
    try:
        yield server
    finally:
        datagrams.close()
        streams.close()
