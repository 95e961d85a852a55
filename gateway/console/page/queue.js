// Who waits and why, the room of the replicas, and what tenants use of their limits.

import { WAITS, cell, counted, element, fill, number } from "./elements.js";

export function drawQueue(cluster) {
  fill("waiting", cluster.pools.flatMap((pool) => pool.waiting.map((line) => element("tr", {}, cell(line.tenant),
    number(line.requests), cell(`${Number(line.oldest_s ?? 0).toFixed(1)} s`, "number"), cell(WAITS[line.why] ?? line.why), cell(line.band),
    cell(pool.pool)))), cluster.is_of_now ? "Nobody waits." : "Not known.");
  fill("rooms", cluster.pools.flatMap((pool) => pool.replicas.map((room) => element("tr", {}, cell(room.replica), roomOf(room, cluster),
    cell(room.slots ? `${room.active_requests} of ${room.slots}` : String(room.active_requests), "number"),
    cell(`${room.backlog_s.toFixed(1)} s`, "number"), cell(pool.pool)))), cluster.is_of_now ? "No replica is known." : "Not known.");
  fill("tenants", cluster.tenants.map((tenant) => element("tr", { "data-tenant": tenant.name }, cell(tenant.name), cell(tenant.band), number(tenant.weight),
    used(tenant.active_requests, tenant.concurrency, "not counted"), used(tenant.requests_used, tenant.requests_per_min),
    used(tenant.tokens_used, tenant.tokens_per_min))), cluster.is_of_now ? "The configuration has no `tenants`." : "Not known.");
}

function roomOf(room, cluster) {
  if (!cluster.is_of_now) return cell("not known", "quiet");
  if (room.has_room) return cell("yes", "good");
  return room.state === "ready" ? cell("no", "warn") : cell(`no: ${room.state}`, ["draining", "drained", "asleep"].includes(room.state) ? "warn" : "bad");
}

function used(amount, limit, unlimited = "no limit") {
  if (limit === null) return cell(amount === null ? unlimited : `${counted(amount)} (no limit)`, "number quiet");
  return cell(`${counted(amount)} of ${counted(limit)}`, amount >= limit ? "number warn" : "number");
}
