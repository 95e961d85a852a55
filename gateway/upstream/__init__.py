"""The only package of a gateway that speaks to replicas.

client      sends requests: those of clients, and those for control
origin      the connections to one replica's address
connection  one HTTP/1.1 connection
answer      a replica's answer as it arrives
excerpts    reads large JSON in part
errors      UpstreamError
"""

from gateway.upstream.answer import Answer
from gateway.upstream.client import ControlAnswer, Upstream
from gateway.upstream.connection import Buffer
from gateway.upstream.errors import UpstreamError

__all__ = ["Answer", "Buffer", "ControlAnswer", "Upstream", "UpstreamError"]
