// Who waits and why, the room of the replicas, and what tenants use of their limits.

import { WAITS, barCell, cell, counted, element, fill, inPool, number } from "./elements.js";

export function drawQueue(cluster) {
  fill("waiting", cluster.pools.flatMap((pool) => pool.waiting.map((line) => element("tr", { "data-key": `${pool.pool} ${line.tenant} ${line.why} ${line.band}` }, cell(line.tenant),
    number(line.requests), cell(`${Number(line.oldest_s ?? 0).toFixed(1)} s`, "number"), cell(WAITS[line.why] ?? line.why), cell(line.band),
    inPool("td", cluster, pool.pool)))), cluster.is_of_now ? "Nobody waits." : "Not known.");
  fill("rooms", cluster.pools.flatMap((pool) => pool.replicas.map((room) => element("tr", { "data-key": `${pool.pool} ${room.replica}` }, cell(room.replica), roomOf(room, cluster),
    room.slots ? used("in flight", room.active_requests, room.slots) : number(room.active_requests),
    cell(`${room.backlog_s.toFixed(1)} s`, "number"), inPool("td", cluster, pool.pool)))), cluster.is_of_now ? "No replica is known." : "Not known.");
  fill("tenants", cluster.tenants.map((tenant) => element("tr", { "data-key": tenant.name }, cell(tenant.name), cell(tenant.band), number(tenant.weight),
    used("in flight", tenant.active_requests, tenant.concurrency, "not counted"),
    used("requests a minute", tenant.requests_used, tenant.requests_per_min), used("tokens a minute", tenant.tokens_used, tenant.tokens_per_min))), cluster.is_of_now ? "The configuration has no `tenants`." : "Not known.");
}

function roomOf(room, cluster) {
  if (!cluster.is_of_now) return cell("not known", "quiet");
  if (room.has_room) return cell("yes", "good");
  return room.state === "ready" ? cell("no", "warn") : cell(`no: ${room.state}`, ["draining", "drained", "asleep"].includes(room.state) ? "warn" : "bad");
}

function used(title, amount, limit, unlimited = "no limit") {
  if (limit === null) return cell(amount === null ? unlimited : `${counted(amount)} (no limit)`, "number quiet");
  return barCell(title, amount ?? 0, limit, `${counted(amount)} of ${counted(limit)}`);
}
