"""How the events of each API tell an answer: one file for each.

A stream that breaks is read with its grammar, and the rest is written in it: see seam.py. The rest itself always comes
as a chat or as a completion.
"""

from __future__ import annotations

from typing import Final

from gateway.endpoints import Endpoint
from gateway.relay.grammars.chunks import Chunks
from gateway.relay.grammars.grammar import Grammar
from gateway.relay.grammars.messages import Messages
from gateway.relay.grammars.responses import Responses

__all__ = ["Grammar", "grammar_of"]

_OF_PROMPTS: Final[dict[str | None, type[Grammar]]] = {"message": Messages, "response": Responses}


def grammar_of(endpoint: Endpoint, model: str) -> Grammar:
    """The grammar of a stream of which nothing was read. `model`: the name that the client used."""
    return _OF_PROMPTS.get(endpoint.prompt, Chunks)(model)
