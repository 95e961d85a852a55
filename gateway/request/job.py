"""What a client asks for, read and checked. Nothing of it changes afterwards, but for its `route`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gateway.endpoints import Endpoint
from gateway.request.keyring import Caller
from gateway.request.reading import Body
from gateway.request.reading.model_field import Span
from gateway.request.route import Route


class Job(NamedTuple):  # a frozen dataclass takes 2.5 times as long to make
    """One client request, ready to be placed and sent."""

    id: str
    method: str
    path: str
    """The client's path, decoded, without a slash at its end."""
    endpoint: Endpoint
    target: str
    """Path and query for the replica."""
    caller: Caller
    policy: str
    headers: Mapping[str, str]
    """The headers for any replica. Those of one attempt are in relay/outgoing.py."""
    route: Route
    """Where it goes. A variant of a request needs its own."""
    session: str = ""
    """What its client calls its conversation; "" if it does not say."""
    model: str | None = None
    """The name that the client used."""
    body: Body = b""
    """The body for the replica."""
    model_at: Span | None = None
    """Where the text of `model` is in the body, if that was looked for."""
    prompt_tokens: int = 0
    """The tokens of its prompt, as estimated when it was read; 0 if there is no prompt."""
    images: int = 0
    """The images, audio and videos of its prompt."""
    stream: bool = False
    strip_usage: bool = False
    """Whether the gateway has asked for the usage of a stream in the place of its client, who does not want it."""
    is_usage_open: bool = False
    """Whether the client of a stream says nothing of its usage."""
    is_batch: bool = False
    """Whether the request has several prompts. The engine's usage is then their sum."""
    reads_cache: bool = True
    """False if the engine must compute every prompt token, because the client wants prompt logprobs."""
    wants_token_ids: bool = False
    """Whether the client asked for token ids itself."""
    not_resumed: str = "api"
    """Why its stream could not go on at another replica; empty if it could."""
    asks_ids: bool = False
    """Whether its stream could go on by token ids, so that its replica is asked for them."""
    choices: int = 1
    """How many answers the engine generates side by side, of all prompts together."""
    max_output_tokens: int | None = None
    """The most tokens that the engine generates for it, of all choices together; None if the client set no limit."""
    refers_to: str = ""
    """The id of a stored object that its body names."""
    is_traced: bool = False
    """Whether somebody wants to see what its candidates cost."""
    has_tools: bool = False
    """Whether it offers tools to its model."""
    is_background: bool = False
    """Whether the engine goes on without the client: its answer, or its connection, ends before it is generated."""
    has_effects: bool = False
    """Whether the request may do more than compute its answer. Once sent, it is not sent to another replica."""
    priority: int | None = None
    """What its InferenceObjective gives it; None if it names none."""

    @property
    def other_name(self) -> str:
        """The name by which its replicas know its model, if the client used another one; else empty. A replica that
        it is pinned to may serve other models only, and then refuses the name that the client used."""
        route = self.route
        name = route.served.name
        if not name or self.model is None or name == self.model:
            return ""
        return name if not route.pinned or any(each.name == name for each in route.backends) else ""
