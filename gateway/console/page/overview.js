// The replicas, the last 15 minutes as curves, and the cluster as a picture; before these, what is wrong.

import { drainButton } from "./drain.js";
import { at, barCell, card, cell, clock, counted, drawing, duration, element, fill, inPool, isBehind, marked, number, percent, rate } from "./elements.js";
import { lastMinute } from "./figures.js";
import { agentOf, problemsOf, setFindings, stateOf } from "./status.js";

const CURVE_MS = 15 * 60 * 1000;
const POINTS_A_MINUTE = 12;
const GAP_MS = 15_000;

export function drawOverview(cluster) {
  list("wrong", "problems", problemsOf(cluster).map(([text, className]) => element("li", { class: className }, ...marked(text))));
  const minute = lastMinute();
  at("since").textContent = sinceWhen(minute);
  fill("replicas", cluster.replicas.map((replica) => rowOf(replica, minute.of(replica.id), cluster)), "No replica is known.");
  drawBackends(cluster, minute);
  at("curves").replaceChildren(...cluster.pools.flatMap((pool) => [
    inPool("h3", cluster, pool.pool), element("div", { class: "cards curves" }, ...curvesOf(pool, cluster))]));
  at("picture").replaceChildren(pictureOf(cluster));
}

// A list that is there only if it has something.
function list(section, id, found) {
  at(section).hidden = found.length === 0;
  at(id).replaceChildren(...found);
}

function sinceWhen(minute) {
  if (minute.seconds === null) return "";
  const when = minute.isWhole ? "requests of the last minute" : `requests of the last ${minute.seconds} s, since the page opened`;
  return minute.isEstimated ? `${when}; estimated from a part of them` : when;
}

function rowOf(replica, minute, cluster) {
  const [state, className] = stateOf(replica);
  const [agent, agentClass] = agentOf(replica);
  const usage = replica.kv_usage;
  return element("tr", { "data-key": replica.id }, cell(replica.id), cell(state, className), cell(agent, `long ${agentClass}`),
    cell(rate(minute.requestsPerS), "number"), cell(duration(minute.ttftMs), "number"),
    cell(counted(minute.errors), minute.errors ? "number bad" : "number"), number(replica.active_requests),
    typeof usage === "number" ? barCell("KV in use", usage, 1, percent(usage)) : cell("–", "number"),
    number(replica.keys), inPool("td", cluster, replica.pool), element("td", {}, drainButton(replica, cluster.is_of_now)));
}

// The backends of configured models; nothing if there are none.
function drawBackends(cluster, minute) {
  const found = Object.entries(cluster.backends).flatMap(([model, backends]) => Object.entries(backends).map((named) => [model, ...named]));
  at("models-any").hidden = found.length === 0;
  at("weights").textContent = cluster.weights === "exact" ? "" : `weights are ${cluster.weights}`;
  fill("backends", found.map(([model, name, backend]) => {
    const own = minute.ofBackend(model, name);
    const isMissing = backend.weight > 0 && backend.ready_replicas === 0;
    return element("tr", { "data-key": `${model} ${name}` }, cell(model, "long"), cell(name), number(backend.weight),
      cell(counted(backend.ready_replicas), isMissing ? "number bad" : "number"), cell(rate(own.requestsPerS), "number"),
      cell(duration(own.ttftMs), "number"), cell(counted(own.errors), own.errors ? "number bad" : "number"), cell(percent(own.cached), "number"));
  }), "");
}

export function drawFindings(told) {
  setFindings(told.findings);
  list("found-any", "findings", told.findings.map((finding) => element("li", { class: finding.severity === "error" ? "bad" : "warn" },
    element("strong", {}, `${finding.subject}: `), `${finding.what.replace(/\.$/, "")}.`,
    element("p", {}, "Why it matters: ", ...marked(finding.why)), element("p", {}, "Fix: ", ...marked(finding.fix)))));
  const more = told.more ? ` ${told.more} more are not shown.` : "";
  const found = told.findings.length ? "" : " and found nothing";
  const rest = told.unchecked?.length ? ` Not checked from here (kvgate doctor may): ${told.unchecked.join("; ")}.` : "";
  at("looked").textContent = `The doctor looked at ${clock(told.time_ms)}${found}. It looked at: ${told.looked_at}.${more}${rest} It looks again every minute.`;
}

// -- curves -----------------------------------------------------------------------------------------------------------

function curvesOf(pool, cluster) {
  const [points, names] = [pool.history, cluster.point];
  const isLate = isBehind(pool, cluster);
  const values = (name) => points.map((point) => point[names.indexOf(name)]);
  const ratio = (part, whole) => risen(values(part), values(whole));
  const ofCache = ratio("cached_tokens_total", "looked_up_tokens_total");
  const firstTokens = ratio("first_tokens_ms_sum", "first_tokens_total");
  const inMs = (value) => `${counted(Math.round(value))} ms`;
  const inS = (value) => `${value.toFixed(1)} s`;
  const one = (title, of, said, least, now = isLate ? null : of[of.length - 1]) => curve(title, points, of, said, least, now);
  return [
    one("requests in flight", values("running_requests"), counted, 4),
    one("queued requests", values("waiting_requests"), counted, 4, pool.waiting_requests),
    one("KV in use", values("kv_usage"), percent, 1),
    one("prompt tokens from cache", ofCache, percent, 1),
    one("time to first token", firstTokens, inMs, 50),
    one("event lag", values("event_lag_s"), inS, 1),
  ];
}

// By how much one counter has risen within a minute, for each by which the other has; null if that one has not, or if a
// counter began anew.
function risen(parts, wholes) {
  return parts.map((part, i) => {
    const before = Math.max(0, i - POINTS_A_MINUTE);
    const rise = part - parts[before];
    const base = wholes[i] - wholes[before];
    return wholes[i] === null || wholes[before] === null || base <= 0 || rise < 0 ? null : rise / base;
  });
}

// One curve: `said` says a value in words, `least` is the least end of the scale, `now` is the value of now; null: not known.
function curve(title, points, values, said, least, now) {
  const first = Date.now() - CURVE_MS;
  const highest = values.reduce((most, value) => (value > most ? value : most), least);
  let path = "";
  let isOn = false;
  values.forEach((value, i) => {
    const x = (100 * (points[i][0] - first)) / CURVE_MS;
    const isSeen = value !== null && x >= 0;
    const hasGap = i > 0 && points[i][0] - points[i - 1][0] > GAP_MS;
    if (isSeen) path += `${isOn && !hasGap ? "L" : "M"}${x.toFixed(1)} ${(29 - (28 * value) / highest).toFixed(1)}`;
    isOn = isSeen;
  });
  const attributes = { viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img", "aria-label": `${title}, the last 15 minutes` };
  return card(title, now === null || now === undefined ? "–" : said(now), drawing("svg", attributes, drawing("path", { d: path })),
    element("p", { class: "scale quiet" }, ...["−15 min", `0 to ${said(highest)}`, "now"].map((text) => element("span", {}, text))));
}

// -- the picture ------------------------------------------------------------------------------------------------------

const LETTER = 8; // the width of one
const STEP = 18; // between two things without names

const rows = (count, width) => Math.ceil(count / Math.floor(width / STEP));

// The places of `count` things from `top` on: as many rows as they need, evenly over the width.
function places(count, top, width) {
  const across = Math.min(count, Math.floor(width / STEP));
  return Array.from({ length: count }, (_, i) => ({ x: ((i % across) + 0.5) * (width / across), y: top + STEP * Math.floor(i / across) }));
}

const haveRoom = (names, width) => LETTER * Math.max(0, ...names.map((name) => name.length + 1)) * names.length <= width;

const line = (from, to, className) => drawing("path", { d: `M${from.x} ${from.y}L${to.x} ${to.y}`, class: `link ${className}` });

function spot(place, radius, className, title) {
  return drawing("circle", { cx: place.x, cy: place.y, r: radius, class: className }, drawing("title", {}, title));
}

const named = (place, text, isNamed, below) =>
  (isNamed ? [drawing("text", { x: place.x, y: place.y + below, "text-anchor": "middle" }, text)] : []);

// Gateways on top, Redis in the middle, replicas below: each with its agent, which tells Redis what the replica holds.
function pictureOf(cluster) {
  const { replicas } = cluster;
  const width = Math.min(900, Math.max(300, at("picture").clientWidth - 24));
  const lost = cluster.lost_gateways.map((gateway) => ({ id: gateway.id, is_alive: false }));
  const gateways = [...cluster.gateways, ...lost];
  const store = { x: width / 2, y: 92 + STEP * rows(gateways.length, width) };
  const isUp = cluster.store === "up";
  const agents = places(replicas.length, store.y + 70, width);
  const engines = agents.map((place) => ({ x: place.x, y: place.y + 16 + STEP * rows(replicas.length, width) }));
  const areNamed = haveRoom(replicas.map((replica) => `${replica.id} · ${stateOf(replica)[0]}`), width);
  const areGatewaysNamed = haveRoom(gateways.map((gateway) => gateway.id), width);
  const lines = [];
  const spots = [];
  places(gateways.length, 30, width).forEach((place, i) => {
    const className = { true: "good", false: "bad" }[gateways[i].is_alive] ?? "quiet";
    lines.push(line(place, store, className));
    spots.push(spot(place, 8, className, `gateway ${gateways[i].id}`), ...named(place, gateways[i].id, areGatewaysNamed, -14));
  });
  replicas.forEach((replica, i) => {
    const [state, className] = stateOf(replica);
    const [agent, agentClass] = agentOf(replica);
    if (areNamed) lines.push(line(agents[i], store, agentClass), line(engines[i], agents[i], agentClass));
    spots.push(spot(agents[i], areNamed ? 5 : 3, agentClass, `agent of ${replica.id}: ${agent}`));
    spots.push(spot(engines[i], areNamed ? 10 : 5, className, `replica ${replica.id}: ${state}`));
    spots.push(...named(engines[i], `${replica.id} · ${state}`, areNamed, 26));
  });
  const words = isUp ? "Redis" : "Redis does not answer";
  spots.push(spot(store, 14, isUp ? "good" : "bad", words), drawing("text", { x: store.x + 22, y: store.y + 5 }, words));
  const lowest = Math.max(store.y, ...engines.map((place) => place.y)) + 40;
  const label = `gateways: ${cluster.gateways.length}, ${words}, replicas: ${replicas.length}`;
  return drawing("svg", { viewBox: `0 0 ${width} ${lowest}`, role: "img", "aria-label": label }, ...lines, ...spots);
}
