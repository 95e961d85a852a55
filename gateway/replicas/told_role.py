"""The role that a server itself tells: prefill or decode, changed while it runs. Pure.

This is vLLM's runtime role switching (RFC vLLM #56133, in no release up to 0.33). `GET /v1/pd_role` tells the role, an
epoch that rises with each change, and a phase. Only in the phase `ready`, the server takes requests. Each has to name
the role and the epoch. Another one gets a 409 before anything of it is executed, and the 409 tells the three as well.
As `prefill`, it only computes prompts for others; as `decode`, it takes no request without a reference to a prompt
that another one has computed.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import orjson

PATH: Final = "/v1/pd_role"
REFUSED: Final = 409
_ROLES: Final = ("prefill", "decode")
_MOST_BYTES: Final = 16 * 1024


class ToldRole(NamedTuple):
    """What a server tells of its role."""

    role: str
    epoch: int
    is_ready: bool

    def headers(self, role: str) -> dict[str, str]:
        """Those of a request for this role. If the server has another one by now, it refuses the request."""
        return {"x-vllm-pd-role": role, "x-vllm-pd-epoch": str(self.epoch)}


def parse_role(body: bytes) -> ToldRole | None:
    """What an answer tells; None if it tells no role."""
    if len(body) > _MOST_BYTES:
        return None
    try:
        document: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    told = document if isinstance(document, dict) else {}
    role, epoch = told.get("role"), told.get("epoch")
    if role not in _ROLES or type(epoch) is not int or epoch < 0:
        return None
    return ToldRole(role, epoch, told.get("phase") == "ready")
