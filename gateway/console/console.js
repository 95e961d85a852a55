// The console. It draws what /console/live tells, and asks nobody else. Text from the cluster is only ever set as text.
"use strict";

const MOST_ROWS = 300;
const VIEWS = ["overview", "decisions", "prefixes", "queue", "ask"];
const PREFIXES_MS = 5000;
const FILTERS = ["model", "replica", "why", "tenant", "request_id"];
const at = (id) => document.getElementById(id);
const records = []; // the newest first
let dropped = 0;

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const cell = (text, className = "") => element("td", className ? { class: className } : {}, text ?? "–");
const number = (value) => cell(value === null || value === undefined ? "–" : Number(value).toLocaleString("en"), "number");
const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)} %`);

function fill(id, rows, none) {
  const body = at(id);
  if (rows.length === 0) {
    const columns = body.parentElement.querySelectorAll("th").length;
    rows = [element("tr", {}, element("td", { colspan: columns, class: "quiet" }, none))];
  }
  body.replaceChildren(...rows);
}

// -- overview ---------------------------------------------------------------------------------------------------------

function stateOf(replica) {
  if (replica.breaker_open) return ["breaker open", "bad"];
  const classes = { ready: "good", draining: "warn" };
  return [replica.state, classes[replica.state] ?? "bad"];
}

function problemsOf(cluster) {
  const found = cluster.problems.map((problem) => `${problem.where}: ${problem.what}`);
  for (const gateway of cluster.gateways) {
    if (!gateway.is_alive) found.push(`gateway ${gateway.id}: its lease has run out`);
  }
  for (const replica of cluster.replicas) {
    const [state, className] = stateOf(replica);
    if (className === "bad" && !found.some((text) => text.startsWith(`replica ${replica.id}:`))) {
      found.push(`replica ${replica.id}: ${state}`);
    }
  }
  return found;
}

function drawOverview(cluster) {
  const problems = problemsOf(cluster);
  at("problems").replaceChildren(
    ...(problems.length ? problems.map((text) => element("li", {}, text)) : [element("li", { class: "good" }, "Nothing.")]),
  );
  const gateways = cluster.gateways.map((gateway) =>
    element("li", {}, element("span", { class: gateway.is_alive ? "good" : "bad" }, "● "), gateway.id));
  const store = element("li", {}, element("span", { class: cluster.store === "up" ? "good" : "bad" }, "● "), `Redis: ${cluster.store}`);
  at("gateways").replaceChildren(store, ...gateways);
  fill("replicas", cluster.replicas.map((replica) => {
    const [state, className] = stateOf(replica);
    return element("tr", { "data-replica": replica.id }, cell(replica.id), cell(replica.pool), cell(state, className),
      number(replica.active_requests), cell(percent(replica.kv_usage), "number"), number(replica.keys),
      cell(replica.exact ? "confirmed" : "claims only"));
  }), "No replica is known.");
  at("curves").replaceChildren(...cluster.pools.flatMap(curvesOf));
}

function curvesOf(pool) {
  const points = pool.history;
  const last = points[points.length - 1] ?? [];
  const cached = points.map((point, i) => shareBetween(points[Math.max(0, i - 12)], point));
  return [
    curve(`${pool.pool}: requests in flight`, points, points.map((point) => point[1]), last[1] ?? 0),
    curve(`${pool.pool}: requests that wait`, points, points.map((point) => point[2]), pool.waiting_requests),
    curve(`${pool.pool}: KV in use`, points, points.map((point) => point[3]), percent(last[3]), 1),
    curve(`${pool.pool}: prompt tokens from cache`, points, cached, percent(cached[cached.length - 1]), 1),
  ];
}

// The share of tokens found in caches between two points; null if nothing was looked up, or an engine began anew.
function shareBetween(before, after) {
  const hits = after[4] - before[4];
  const asked = after[5] - before[5];
  return after[5] === null || before[5] === null || asked <= 0 || hits < 0 ? null : hits / asked;
}

function curve(title, points, values, now, least = 4) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const first = Date.now() - 15 * 60 * 1000;
  const highest = Math.max(least, ...values.filter((value) => value !== null));
  let path = "";
  let isOn = false;
  values.forEach((value, i) => {
    const x = (points[i][0] - first) / 9000;
    if (value !== null && x >= 0) path += `${isOn ? "L" : "M"}${x.toFixed(1)} ${(29 - (28 * value) / highest).toFixed(1)}`;
    isOn = value !== null && x >= 0;
  });
  svg.setAttribute("viewBox", "0 0 100 30");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${title}, the last 15 minutes, at most ${highest}`);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", path);
  svg.append(line);
  return element("div", { class: "card" }, element("span", { class: "quiet" }, title), element("strong", {}, String(now)), svg);
}

// -- decisions --------------------------------------------------------------------------------------------------------

function drawRecords() {
  const filters = new FormData(at("filters"));
  const wanted = FILTERS.map((name) => [name, (filters.get(name) ?? "").trim()]).filter(([, value]) => value);
  const shown = records.filter((record) => wanted.every(([name, value]) => String(record[name] ?? "").includes(value)));
  fill("records", shown.slice(0, 100).map(rowOf), records.length ? "No request matches the filters." : "No request has ended since this page was opened.");
  at("counts").textContent = `${records.length} kept, ${shown.length} match, ${dropped} left out because they were too many.`;
}

function rowOf(record) {
  const row = element("tr", { tabindex: 0, "data-request": record.request_id }, cell(record.time.slice(11, 23)), cell(record.gateway),
    cell(record.model), cell(record.replica), cell(record.why), number(record.prompt_tokens), number(record.matched_tokens),
    number(record.cached_tokens), cell(record.first_byte_ms === null ? "–" : `${record.first_byte_ms} ms`, "number"),
    cell(String(record.status), record.status >= 400 ? "number bad" : "number"));
  row.addEventListener("click", () => showRecord(record));
  row.addEventListener("keydown", (event) => event.key === "Enter" && showRecord(record));
  return row;
}

function showRecord(record) {
  const rows = Object.entries(record).flatMap(([name, value]) =>
    [element("dt", {}, name), element("dd", {}, value === null ? "–" : String(value))]);
  at("record").querySelector("dl").replaceChildren(...rows);
  at("record").showModal();
}

// -- prefixes ---------------------------------------------------------------------------------------------------------

let prefixes = [];

async function readPrefixes() {
  if (at("prefixes").hidden || document.hidden) return;
  try {
    const answer = await fetch("/console/prefixes");
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.error.message);
    prefixes = told.prefixes;
    at("found").textContent = `${prefixes.length} keys, of those that replicas used last.`;
    drawPrefixes();
  } catch (error) {
    at("found").textContent = `They cannot be read: ${error.message}`;
  }
}

function drawPrefixes() {
  const by = new FormData(at("order")).get("by");
  const sorted = [...prefixes].sort((a, b) => (b[by] ?? -1) - (a[by] ?? -1));
  fill("keys", sorted.slice(0, 100).map((each) => element("tr", {}, cell(each.key.slice(0, 12)), cell(each.pool), number(each.tokens),
    number(each.hits), number(each.copies), cell(new Date(each.last_use_ms).toLocaleTimeString()),
    cell(each.owners.map(ownerOf).join(", ")))), "No replica holds anything yet.");
}

// -- queue ------------------------------------------------------------------------------------------------------------

function drawQueue(cluster) {
  const lines = cluster.pools.flatMap((pool) => pool.waiting.map((line) => element("tr", {}, cell(pool.pool), cell(line.band),
    cell(line.tenant), number(line.requests), cell(`${Number(line.oldest_s ?? 0).toFixed(1)} s`, "number"), cell(line.why))));
  fill("waiting", lines, "Nobody waits.");
  fill("rooms", cluster.pools.flatMap((pool) => pool.replicas.map((room) => element("tr", {}, cell(pool.pool), cell(room.replica),
    cell(room.slots ? `${room.active_requests} of ${room.slots}` : String(room.active_requests), "number"),
    cell(`${room.backlog_s.toFixed(1)} s`, "number"), cell(room.has_room ? "yes" : "no", room.has_room ? "good" : "warn")))), "No replica is known.");
}

// -- ask --------------------------------------------------------------------------------------------------------------

function drawModels(cluster) {
  const select = at("models");
  const known = [...select.options].map((option) => option.value);
  if (known.join("\n") === cluster.models.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...cluster.models.map((name) => element("option", {}, name)));
  if (cluster.models.includes(chosen)) select.value = chosen;
}

function asDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

async function bodyOf(form) {
  const fields = new FormData(form);
  const image = fields.get("image");
  let content = fields.get("prompt");
  if (image && image.size) {
    const part = { type: "image_url", image_url: { url: await asDataUrl(image) } };
    content = [part, { type: "text", text: content }];
  }
  const system = fields.get("system") ? [{ role: "system", content: fields.get("system") }] : [];
  return JSON.stringify({ model: fields.get("model"), messages: [...system, { role: "user", content }] });
}

async function explain(event) {
  event.preventDefault();
  at("choice").textContent = "asking";
  try {
    const headers = { "content-type": "application/json", "x-kvgate-csrf": token };
    const answer = await fetch("/console/explain", { method: "POST", headers, body: await bodyOf(event.target) });
    const told = await answer.json();
    if (answer.ok) drawExplained(told);
    else at("choice").textContent = told.error.message;
  } catch (error) {
    at("choice").textContent = `The gateway did not answer: ${error}`;
  }
}

// Where it holds the key (gpu, cpu), and how that is known: an engine has said so (resident), or a gateway assumes it (claim).
const ownerOf = (owner) => `${owner.replica} (${owner.medium}, ${owner.stale ? "of an earlier life" : owner.kind})`;

function drawExplained(told) {
  const choice = told.choice;
  const waits = choice.waits ? `, but it waits first (${choice.waits.why})` : "";
  at("choice").textContent = choice.replica
    ? `It would go to ${choice.replica}: ${choice.why}, ${choice.matched_tokens} of ${told.prompt_tokens} tokens matched${waits}.`
    : `${choice.why}${told.reason ? `: ${told.reason}` : ""}`;
  fill("costs", told.replicas.map((each) => element("tr", {}, cell(each.replica, each.replica === choice.replica ? "good" : ""),
    ...["matched_tokens", "charged_tokens", "displaced_tokens", "backlog_tokens", "load_tokens", "cost"].map(
      (name) => number(each[name] === undefined ? null : Math.round(each[name]))))), "No replica was looked at.");
  fill("chain", told.chain.map((link) => element("tr", {}, cell(link.key.slice(0, 12)), number(link.tokens), number(link.images),
    cell(link.owners.map(ownerOf).join(", ") || "nobody"))), "This prompt is too short to have a chain.");
}

// -- the page ---------------------------------------------------------------------------------------------------------

function showView() {
  const wanted = VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "overview";
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== wanted;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${wanted}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  readPrefixes();
}

function listen() {
  const source = new EventSource("/console/live");
  source.addEventListener("open", () => { at("link").textContent = "live"; });
  source.addEventListener("cluster", (event) => {
    const cluster = JSON.parse(event.data);
    at("link").textContent = `live, from ${cluster.gateway}`;
    drawOverview(cluster);
    drawQueue(cluster);
    drawModels(cluster);
  });
  source.addEventListener("decisions", (event) => {
    if (at("filters").elements.paused.checked) return;
    records.unshift(...JSON.parse(event.data).reverse());
    records.length = Math.min(records.length, MOST_ROWS);
    drawRecords();
  });
  source.addEventListener("dropped", (event) => { dropped += Number(event.data); drawRecords(); });
  source.addEventListener("error", () => {
    at("link").textContent = "not connected; trying again";
    if (source.readyState === EventSource.CLOSED) setTimeout(again, 2000);
  });
}

// The stream was refused: the session is over, or too many pages are open.
async function again() {
  const answer = await fetch("/console", { redirect: "manual" }).catch(() => null);
  if (answer && answer.type === "opaqueredirect") location.assign("/console/login");
  else listen();
}

const token = document.querySelector("meta[name=token]").content;
at("logout").hidden = token === "";
at("logout").addEventListener("click", async () => {
  await fetch("/console/logout", { method: "POST", headers: { "x-kvgate-csrf": token } });
  location.assign("/console/login");
});
at("filters").addEventListener("input", drawRecords);
at("filters").addEventListener("submit", (event) => event.preventDefault());
at("question").addEventListener("submit", explain);
at("order").addEventListener("input", drawPrefixes);
setInterval(readPrefixes, PREFIXES_MS);
window.addEventListener("hashchange", showView);
showView();
drawRecords();
listen();
