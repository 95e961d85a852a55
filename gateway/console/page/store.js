// The Redis that all gateways share, as the process that watches it has found it.

import { at, card, cell, clock, counted, element, fill, inPool, isBehind, number, problems, size } from "./elements.js";

const KINDS = { coordination: "KVGate's own", chunk: "LMCache's chunks of KV", other: "other programs'" };

export function drawStore(cluster) {
  const report = cluster.report;
  if (report.version === undefined) {
    at("watched").textContent = cluster.is_of_now ? "No gateway watches this Redis now, or it began just now (docs/store.md)." : "";
    at("figures").replaceChildren();
    fill("kinds", [], "Not known.");
  } else {
    at("watched").textContent = `Redis ${report.version}, watched by ${report.watcher}. The figures are renewed every 5 s${cluster.is_of_now ? "" : `; these are of ${clock(cluster.seen_ms)}`}.`;
    const limit = report.maxmemory_bytes ? `of ${size(report.maxmemory_bytes)}, ${report.policy}` : "no limit";
    at("figures").replaceChildren(
      card(`memory (${limit})`, size(report.used_bytes)),
      card("keys evicted since its start", counted(report.evicted_keys)),
      card("writes refused since its start", counted(report.refused_writes)),
      card("scripts a second", counted(report.scripts_per_s)),
      card("average time of a script", report.scripts_per_s ? `${report.script_us} µs` : "–"),
    );
    fill("kinds", Object.entries(report.kinds).map(([kind, of]) => element("tr", {}, cell(KINDS[kind] ?? kind), number(of.keys),
      cell(size(of.bytes), "number"), cell(of.evicted === null ? "not heard" : counted(of.evicted), "number"))), "Not known.");
  }
  const conditions = Object.entries(report.conditions ?? {});
  const isKnown = cluster.is_of_now && report.version !== undefined;
  if (isKnown || conditions.length) {
    problems("conditions", conditions.map(([name, words]) => element("li", { class: "warn" }, element("strong", {}, `${name}: `), words)), "Nothing is wrong.");
  } else {
    at("conditions").replaceChildren(element("li", {}, "Not known."));
  }
  fill("chores", cluster.pools.map((pool) => {
    const last = isBehind(pool, cluster) ? [] : pool.history[pool.history.length - 1];
    const seconds = (name) => { const lag = last[cluster.point.indexOf(name)]; return cell(typeof lag === "number" ? `${lag.toFixed(1)} s` : "–", "number"); };
    return element("tr", { "data-key": pool.pool }, inPool("td", cluster, pool.pool), seconds("event_lag_s"), seconds("chores_lag_s"));
  }), cluster.is_of_now ? "No pool is known." : "Not known.");
}
