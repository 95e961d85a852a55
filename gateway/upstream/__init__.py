"""The only module that speaks to replicas."""

from gateway.upstream.answer import Answer
from gateway.upstream.client import Upstream
from gateway.upstream.connection import Buffer
from gateway.upstream.errors import UpstreamError

__all__ = ["Answer", "Buffer", "Upstream", "UpstreamError"]
