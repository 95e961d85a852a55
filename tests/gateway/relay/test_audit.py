"""Usage in three dialects, the shortfalls that mean an eviction, and the cause of a wrong prediction."""

from __future__ import annotations

import pytest

from coordinator.placement import Placement, PlaceRequest
from coordinator.policy_knobs import PolicyKnobs
from coordinator.pool.pool import Pool
from gateway.metrics.gateway_metrics import Metrics
from gateway.relay import audit
from gateway.relay.audit import Usage, cause_of, is_eviction, known_cached_tokens, read_usage
from gateway.routing.ticket import Ticket
from gateway.tasks import Tasks


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, Usage(9, 4)),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, Usage(9, None)),
        ({"prompt_tokens": 9}, Usage(9, None)),
        ({"prompt_tokens": 9, "completion_tokens": 1}, Usage(9, None, omits_zero=True, output_tokens=1)),
        ({"prompt_tokens": 9, "completion_tokens": 0}, Usage(9, None)),  # an embedding
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 0}}, Usage(9, 0)),
        ({"input_tokens": 9, "cache_read_input_tokens": 3, "output_tokens": 2}, Usage(12, 3, output_tokens=2)),
        (
            {"input_tokens": 9, "output_tokens": 2, "cache_creation_input_tokens": 32, "cache_read_input_tokens": 0},
            Usage(41, 0, output_tokens=2),
        ),
        ({"prompt_tokens": "9"}, None),
        *(({"prompt_tokens": wrong, "completion_tokens": 1}, None) for wrong in (True, -1, 9.0, 2**63)),
        ({"prompt_tokens": 9, "completion_tokens": -1}, Usage(9, None)),
        (
            {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": -4}},
            Usage(9, None, output_tokens=1),
        ),
        (None, None),
    ],
)
def test_usage_is_read_in_every_apis_form(usage: object, expected: Usage | None) -> None:
    assert read_usage(usage) == expected


@pytest.mark.parametrize(
    ("usage", "replica_reports", "cached"),
    [
        (Usage(9, None, omits_zero=True), True, 0),
        (Usage(9, None, omits_zero=True), False, None),
        (Usage(9, None), True, None),  # /v1/messages, or an embedding
        (Usage(9, 4, omits_zero=True), True, 4),
        (Usage(9, 0), False, 0),
    ],
)
def test_a_replica_that_reports_cached_tokens_means_none_by_leaving_them_out(
    usage: Usage, replica_reports: bool, cached: int | None
) -> None:
    assert known_cached_tokens(usage, replica_reports) == cached


@pytest.mark.parametrize(
    ("predicted", "cached", "evicted"),
    [(1000, 0, True), (1000, 499, True), (1000, 500, False), (60, 0, False), (0, 0, False), (100, 200, False)],
)
def test_only_a_large_shortfall_counts_as_an_eviction(predicted: int, cached: int, evicted: bool) -> None:
    assert is_eviction(predicted, cached) is evicted


NOW_MS = 1_000_000
BLOCK_TOKENS = 16


def ticket(matched: int = 2, kind: str = "resident", age_s: float = 60, mode: str = "session") -> Ticket:
    """The ticket of a prompt of 300 tokens whose keys end at 100, 200 and 300. The replica had `matched` of these
    keys."""
    request = PlaceRequest("one", ["k1", "k2", "k3"], [100, 200, 300], 300, PolicyKnobs(), seed=1)
    placement = Placement(
        replica="r0",
        incarnation="life",
        url="http://r0",
        why="hit",
        matched_keys=matched,
        matched_tokens=100 * matched,
        claimed_from=matched + 1 if matched < 3 else 0,
        touch=True,
        last_use_ms=NOW_MS - int(age_s * 1000),
        backlog_tokens=0,
        matched_kind=kind,
        matched_entry="7" if kind == "resident" else "",
        placed_ms=NOW_MS,
        mode=mode,
        report=False,
    )
    pool = Pool("m", "gw0", 1.0)
    return Ticket(pool, request, "r0", "life", "http://r0", "hit", placement.matched_tokens, placement)


@pytest.mark.parametrize(
    ("of", "cached_tokens", "cause"),
    [
        (ticket(), 200, ""),
        (ticket(), 200 - BLOCK_TOKENS, ""),  # rounded down to whole blocks
        (ticket(), 300 + BLOCK_TOKENS, ""),  # nothing is known up to the chain's next key
        (ticket(), 300 + BLOCK_TOKENS + 1, "untold"),
        (ticket(matched=0), 100, ""),
        (ticket(matched=0), 200, "untold"),
        (ticket(matched=0), 0, ""),
        (ticket(matched=3), 300, ""),
        (ticket(), 200 - BLOCK_TOKENS - 1, "evicted"),
        (ticket(), 0, "evicted"),
        (ticket(kind="resident", age_s=0), 0, "evicted"),
        (ticket(kind="claim", age_s=1), 0, "in_flight"),
        (ticket(kind="claim", age_s=1, mode=""), 0, "in_flight"),
        (ticket(kind="claim", age_s=60), 0, "never_computed"),
        (ticket(kind="claim", age_s=60, mode=""), 0, "evicted"),  # no agent could have reported it
    ],
)
def test_a_wrong_prediction_has_one_cause(of: Ticket, cached_tokens: int, cause: str) -> None:
    assert cause_of(of, cached_tokens, BLOCK_TOKENS, is_current_life=True) == cause


@pytest.mark.parametrize("kind", ["resident", "claim"])
def test_an_answer_of_a_life_that_is_over_says_nothing_of_this_one(kind: str) -> None:
    assert cause_of(ticket(kind=kind, age_s=1), 0, BLOCK_TOKENS, is_current_life=False) == "restarted"


def test_without_the_store_nothing_was_predicted() -> None:
    fallen_back = ticket()
    fallen_back.placement = None
    assert cause_of(fallen_back, 10_000, BLOCK_TOKENS, is_current_life=True) == ""
    assert fallen_back.state == "fallback"


@pytest.mark.parametrize(
    ("mode", "state"),
    [
        ("session", "exact"),
        *((mode, "degraded") for mode in ("", "partial", "unconfirmed", "token_ids")),
    ],
)
def test_a_placement_is_exact_where_events_confirm_it(mode: str, state: str) -> None:
    assert ticket(mode=mode).state == state


@pytest.mark.parametrize(("matched", "boundary_tokens"), [(0, 100), (1, 200), (2, 300), (3, 300)])
def test_no_more_than_the_next_key_can_be_cached_unknown(matched: int, boundary_tokens: int) -> None:
    assert ticket(matched=matched).boundary_tokens == boundary_tokens


class Missed:
    """An audit, and the keys that it has voided."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.voided: list[list[str]] = []
        monkeypatch.setattr(audit, "void", lambda _pool, _request, _replica, keys: self.voided.append(keys))
        self.tasks = Tasks()
        self.audit = audit.Audit(Metrics(), self.tasks, lambda _replica: BLOCK_TOKENS)

    def answer(self, at_s: float, cached_tokens: int, entry: str = "7", kind: str = "resident", mode: str = "") -> None:
        """An answer to a prompt that was placed `at_s`, and of which 200 tokens were predicted."""
        answered = ticket(kind=kind, mode=mode)
        assert answered.placement is not None
        placed_ms = NOW_MS + int(at_s * 1000)
        changed = {
            "placed_ms": placed_ms,
            "last_use_ms": placed_ms,
            "matched_entry": entry if kind == "resident" else "",
        }
        answered.placement = answered.placement._replace(**changed)
        self.audit.observe(answered, Usage(300, cached_tokens))


@pytest.mark.parametrize("mode", ["session", "partial", "unconfirmed", ""])
@pytest.mark.parametrize(
    ("kind", "cached_tokens", "voided"), [("resident", 0, ["k1", "k2"]), ("claim", 90, ["k1", "k2"])]
)
async def test_a_prefix_that_is_missed_though_it_was_computed_again_is_believed_no_more(
    monkeypatch: pytest.MonkeyPatch, kind: str, mode: str, cached_tokens: int, voided: list[str]
) -> None:
    missed = Missed(monkeypatch)
    for at_s in (0, 1, 11):
        assert missed.voided == []
        missed.answer(at_s, cached_tokens, kind=kind, mode=mode)
    assert missed.voided == [voided]
    missed.answer(12, cached_tokens, kind=kind, mode=mode)
    assert missed.voided == [voided]
    await missed.tasks.close()


async def test_misses_that_are_explained_void_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    missed = Missed(monkeypatch)
    missed.answer(0, 0, entry="7", mode="session")
    missed.answer(20, 0, entry="8", mode="session")  # events told of the eviction, and that it was computed again
    missed.answer(40, 200, entry="8", mode="session")  # then it was served
    missed.answer(60, 0, entry="8", mode="session")
    missed.answer(61, 150, entry="8", mode="session")  # most of it was there
    missed.answer(62, 0, entry="8", mode="session")
    missed.answer(63, 0, kind="claim")  # its prompt may not be computed yet
    missed.answer(72, 0, kind="claim")
    assert missed.voided == []
    await missed.tasks.close()


def test_events_must_confirm_the_claims_of_a_request_that_is_over_but_not_what_the_engine_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched, confirmed = audit.Audit(Metrics(), Tasks(), lambda _replica: BLOCK_TOKENS), list[int]()
    ended, broken = ticket(matched=0), ticket(matched=0)
    for one in (ended, broken):
        monkeypatch.setattr(one.pool.claims, "confirm", lambda _request, _placement, had: confirmed.append(had))
    ended.first_token()
    watched.observe(ended, Usage(300, 200))
    assert confirmed == []
    for _ in range(2):
        ended.ended()
        broken.ended()
    assert confirmed == [200]
