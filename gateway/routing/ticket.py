"""A ticket: one attempt of one request, with the reservation that it holds.

A ticket is told what happens to its attempt, and updates the shared state. Every ending leads to `done`:

    computed      the engine has computed the prompt, so the claims that the placement wrote are true
    first_token   the first token is here: the prompt is computed, and its backlog is over
    failed        the attempt ended without that: its claims are taken back
    done          the load is given back

Each method may be called more than once. In a gateway, every ending of an attempt goes through here (as in httpcore's
connection pool, where every ending of a response reaches one `close`). Exceptions: `place` gives back the load of the
attempt before; Pool undoes late replies; reap.lua gives back a dead gateway's load.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.pool.pool import PlaceRequest, Pool
from coordinator.scripts import Placement, Used
from gateway.routing.rate_limits import limit_headers


@dataclass(slots=True)
class Ticket:
    """One attempt of one request: where it goes, why, and the reservation that goes with it."""

    pool: Pool
    request: PlaceRequest
    replica: str
    incarnation: str
    url: str
    why: str
    matched_tokens: int
    """Prompt tokens that the engine is predicted to serve from its cache, in whole blocks."""
    placement: Placement | None
    """None if the store did not decide."""
    is_room_local: bool = False
    """Whether it went by this gateway's own share of the room: see local_room.py."""
    used: Used | None = field(default=None, init=False)
    """What the request took; None until the answer has told."""
    is_computed: bool = field(default=False, init=False)
    """Whether the engine has computed the prompt, as far as its answer tells."""

    @property
    def state(self) -> str:
        """exact: an agent tells what the replica holds. degraded: nothing confirms the claims of the replica.
        fallback: the store did not decide."""
        if self.placement is None:
            return "fallback"
        return "exact" if self.placement.is_exact else "degraded"

    @property
    def boundary_tokens(self) -> int:
        """About how many tokens end at the chain's next key after the matched one. The engine cannot have more than
        that cached without the map's knowledge. If the engine has told the tokens of the matched part, the rest is
        assumed to have as many tokens per estimated token."""
        tokens, placed = self.request.tokens, self.placement
        if placed is None:
            return tokens[0] if tokens else 0
        found = (placed.matched_keys, placed.matched_tokens), (placed.stored_keys, placed.stored_tokens)
        matched, matched_tokens = max(found, key=lambda each: each[1])
        if matched == 0:
            return tokens[0] if tokens else 0
        if matched >= len(tokens):
            return max(matched_tokens, self.request.prompt_tokens)
        behind = tokens[matched - 1]
        density = max(1.0, matched_tokens / behind) if behind else 1.0
        return matched_tokens + round(density * (tokens[matched] - behind))

    @property
    def decision(self) -> str:
        """The receipt in x-kvgate-decision."""
        stored = self.placement.stored_tokens if self.placement is not None else 0
        beyond = f"; stored_tokens={stored}" if stored else ""
        waited = f"; waited_ms={self.request.waited_s * 1000:.0f}" if self.request.waited_s else ""
        room = "; room=local" if self.is_room_local else ""
        return f"{self.why}; policy={self.request.knobs.name}; state={self.state}{room}{beyond}{waited}"

    @property
    def limit_headers(self) -> dict[str, str]:
        """What is left of the tenant's limits; empty if it has none, or the store did not decide."""
        limits, placed = self.request.limits, self.placement
        return limit_headers(limits, placed.left) if limits is not None and placed is not None and placed.left else {}

    def computed(self) -> None:
        """The engine has computed the prompt. If an agent watches it, its events must now confirm the claims."""
        if not self.is_computed:
            self.is_computed = True
            if self.placement is not None:
                self.pool.claims.confirm(self.request, self.placement)

    def first_token(self) -> None:
        """The prefill is over: its tokens are no backlog any more."""
        self.pool.first_token(self.request.reservation)
        self.computed()

    def failed(self) -> None:
        """The attempt is over. Unless the prompt was computed, its claims are taken back."""
        if not self.is_computed and self.placement is not None:
            self.pool.claims.withdraw(self.request, self.placement)

    def done(self) -> None:
        """The attempt holds no load any more."""
        self.pool.done(self.request.reservation, self.used)
