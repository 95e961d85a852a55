"""The command `kvgate explain`: why a request went where it went."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import typer

from gateway.ops.cli.ask import NotFound, ask, gateway_url
from gateway.ops.cli.options import DEFAULT_STATE_DIR, ApiKey, AsJson, Gateway, StateDir

_WHY = {
    "hit": "the policy chose it, and none that was looked at held more of the prompt",
    "partial_hit": "it held a part of the prompt; another one held more, but the policy chose this one",
    "rebalanced": "another one held a part of the prompt, but the policy chose this one",
    "cold": "the policy chose it, and none that was looked at held any of the prompt",
    "stored": "it could load a part of the prompt from LMCache's tier in Redis",
    "pinned": "it belongs to an earlier response, which this replica has",
    "last_resort": "no replica was healthy",
    "fallback": "Redis did not place it: the gateway chose by hashing",
}
_Found = TypeVar("_Found")
_AGAIN_S, _MOST_ROUNDS = 0.25, 9
"""Gateways send records once a second. So a request that ended just now is asked for again, for 2 s."""


_NOT_HEDGED = {
    "withheld": "the allowance was used up (hedge.max_share)",
    "no_replica": "no other replica was ready and not slow",
    "no_room": "no other replica had room, or requests waited for room",
    "silent": "its server did not answer health checks",
    "refused": "Redis did not answer, or a limit was reached",
}

_UNPAIRED = {
    "short": "less of it was missing there than pairs.min_tokens",
    "itself": "its role is both, so it computes all its prompts",
    "no_room": "no prefill replica had room, or it would have taken much longer there",
    "none": "no prefill replica could be asked",
    "failed": "a replica had failed to compute it, or to decode after that",
    "fallback": "Redis did not place the request",
    "last_resort": "no replica was healthy",
    "pinned": "the request belongs to an earlier response",
    "policy": "requests with another policy than the default are not paired",
    "api": "requests of this path are not paired",
    "no_chain": "the gateway could not tell what replicas hold of it",
}


def explain(
    request_id: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="The x-request-id of its answer.")],
    tenant: Annotated[
        str | None, typer.Option(help="Whose request it is; for admins. Without it, those of all tenants with a key.")
    ] = None,
    gateway: Gateway = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Tell why a request went where it went, after it has ended.

    Any gateway answers, for the tenant that sent it and for admins. The last
    requests are kept, without prompts. If clients have used an id twice, it is
    the last one that is told. For where a prompt would go now: kvgate owners.

    \b
    Examples:
      kvgate explain 5d41402abc4b2a76b9719d911017c592
      kvgate explain my-own-id --tenant research --json
    """
    if not request_id:
        raise typer.BadParameter("it is empty", param_hint="REQUEST_ID")
    query = f"?tenant={quote(tenant, safe='')}" if tenant is not None else ""
    url = f"{gateway_url(gateway, state_dir)}/v1/decisions/{quote(request_id, safe='')}{query}"
    answer = found_soon(lambda: ask("GET", url, api_key, "decisions"))
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    from gateway.ops.cli.printable import all_printable
    from gateway.ops.cli.tables import print_costs

    for number, record in enumerate(all_printable(answer["decisions"])):
        typer.echo("\n" * (number > 0) + "\n".join(reasons(record)))
        if costs := record.get("costs"):
            alone = ", if it computes the prompt itself" if record.get("prefill") else ""
            typer.echo(f"\nwhat each replica would have cost, in tokens{alone}")
            print_costs(costs)


def found_soon(look: Callable[[], _Found], wait: Callable[[float], object] | None = None) -> _Found:
    """What `look` finds now, or a little later. Raises its NotFound if it finds nothing by then."""
    wait = wait or threading.Event().wait
    for _ in range(_MOST_ROUNDS - 1):
        try:
            return look()
        except NotFound:
            wait(_AGAIN_S)
    return look()


def reasons(record: dict[str, Any]) -> Iterator[str]:
    """What a record tells, in words. A tenant's record may lack some of it."""
    error = f" {record['code']}" if record.get("code") else ""
    where = f" at {record['gateway']}" if record.get("gateway") else ""
    yield f"{record['time']}{where}: {record['method']} {record['path']} was answered {record['status']}{error}"
    asked = [f"{name} {record[name]}" for name in ("model", "backend", "tenant", "key") if record.get(name)]
    if asked:
        yield f"asked: {', '.join(asked)}, {_tokens(record['prompt_tokens'])} of prompt"
    if record.get("over_budget"):
        yield _over_budget(record["over_budget"])
    for failed in record.get("failed") or ():
        yield f"tried {failed['replica']}, which failed: {failed['why']}"
    yield from _breaks(record.get("resumed") or (), record["replica"])
    if record.get("late") in _NOT_HEDGED:
        yield f"its first byte was late, and there was no second attempt: {_NOT_HEDGED[record['late']]}"
    if record.get("hedged"):
        yield f"{record['hedged']} was late, so a second attempt was made, which began first"
    if record.get("prefill"):
        yield f"{record['prefill']} computed its prompt for the replica that decoded"
    if unpaired := record.get("unpaired"):
        why = _UNPAIRED.get(unpaired, f"requests with {unpaired} are not paired")
        yield f"the replica that decoded computed its prompt itself: {why}"
    replica = record["replica"]
    if replica is None:
        yield "went to no replica"
        return
    went = "the rest went" if any(each["how"] in ("exact", "text") for each in record.get("resumed") or ()) else "went"
    yield f"{went} to {replica} ({record['why']}): {_WHY.get(record['why'], 'see docs/endpoints.md')}"
    cached = "" if record["cached_tokens"] is None else f"; the engine had {_tokens(record['cached_tokens'])} cached"
    yield f"it was expected to hold {_tokens(record['matched_tokens'])} of the prompt{cached}"
    if record.get("passed_over_tokens"):
        yield f"another one held {_tokens(record['passed_over_tokens'])} more"
    yield from _compared(record, replica)
    first = "" if record["first_byte_ms"] is None else f", first byte after {record['first_byte_ms']:.0f} ms"
    yield f"waited {record['waited_ms']:.0f} ms for room{first}, ended after {record['duration_ms']:.0f} ms"


def _breaks(breaks: Sequence[dict[str, Any]], last_replica: str | None) -> Iterator[str]:
    """How an answer went on each time that a replica broke it off."""
    later = [*(each["replica"] for each in breaks), last_replica][1:]
    for number, (left, following) in enumerate(zip(breaks, later, strict=True)):
        broke = f"broke it off ({left['why']})"
        begun = f"{left['replica']} {broke}" if number else f"began at {left['replica']}, which {broke}"
        if left["how"] == "none":
            yield f"{begun}; it did not go on ({left['why_not']})"
        elif left["how"] == "closed":
            yield f"{begun}; the gateway sent its end"
        else:
            yield f"{begun}; went on at {following} ({left['how']})"


def _over_budget(told: dict[str, Any]) -> str:
    budget, spent, reserved, most = (f"{told[name]:.12g}" for name in ("budget", "spent", "reserved", "may_take"))
    whose, window = f"{told['account']} per {told['per']}", f"next {told['per']} begins at {told['resets']}"
    return (
        f"refused by the budget of its {whose} ({told['window']}): of {budget} {told['unit']}, {spent} are spent and "
        f"{reserved} reserved by requests in flight; it may take {most}; the {window}"
    )


def _compared(record: dict[str, Any], replica: str) -> Iterator[str]:
    """What the next one would have cost."""
    costs = record.get("costs", [])
    if costs is None and record["why"] != "fallback":
        kept = "for a part of the requests (decisions.cost_share), and for all while kvgate watch or a console is open"
        yield f"costs of others: not kept; they are kept {kept}"
    costs = costs or []
    own = [each for each in costs if each["replica"] == replica]
    others = [each for each in costs if each["replica"] != replica]
    if own and others:
        best = min(others, key=lambda each: float(each["cost"]))
        yield (
            f"it cost {own[0]['cost']}, with {own[0]['active_requests']} requests in flight; the next one, "
            f"{best['replica']}, would have cost {best['cost']}, with {best['active_requests']}"
        )


def _tokens(count: int | None) -> str:
    return "unknown tokens" if count is None else f"{count} token{'' if count == 1 else 's'}"
