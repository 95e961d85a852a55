// What all views draw with. Text from the cluster is only ever set as text.

export const at = (id) => document.getElementById(id);

export function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function drawing(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const isKnown = (value) => value !== null && value !== undefined;

export const counted = (value) => (isKnown(value) ? Number(value).toLocaleString("en") : "–");
export const percent = (value) => (isKnown(value) ? `${Math.round(100 * value)}\u00a0%` : "–");
export const cell = (text, className = "") => element("td", className ? { class: className } : {}, text ?? "–");
export const number = (value) => cell(counted(value), "number");
export const rate = (perS) => (isKnown(perS) ? counted(Number(perS.toFixed(perS < 1 ? 2 : perS < 10 ? 1 : 0))) : "–");

// A duration: three digits tell enough.
export function duration(ms) {
  if (!isKnown(ms)) return "–";
  if (ms < 999.5) return `${ms < 100 ? Math.round(10 * ms) / 10 : Math.round(ms)} ms`;
  return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
}

// A cell with a bar: how much of a limit is used. It warns near the limit.
export function barCell(title, used, limit, text, soft = 0.8) {
  const share = Math.max(0, Math.min(1, limit ? used / limit : 1));
  const className = share >= 1 ? "bad" : share >= soft ? "warn" : "good";
  const attributes = { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "meter", "aria-label": title, "aria-valuenow": used, "aria-valuemin": 0, "aria-valuemax": limit, "aria-valuetext": text };
  const bar = drawing("svg", attributes, drawing("rect", { width: 100, height: 10 }), drawing("rect", { width: 100 * share, height: 10, class: className }));
  return element("td", { class: "number" }, bar, text);
}

// A pool is named by the models that it serves; by its own name, too, if another pool serves one of these.
export function poolName(cluster, pool) {
  const all = cluster.models_of_pools;
  const names = all[pool] ?? [];
  if (names.length === 0) return pool ?? "–";
  const words = names.length > 3 ? `${names.slice(0, 2).join(", ")} and ${names.length - 2} more` : names.join(", ");
  const isShared = Object.entries(all).some(([other, models]) => other !== pool && models.some((name) => names.includes(name)));
  return isShared ? `${words} (${pool})` : words;
}

const poolTitle = (cluster, pool) => `pool ${pool}: ${(cluster.models_of_pools[pool] ?? []).join(", ")}`;
export const inPool = (name, cluster, pool) => element(name, { class: "long", title: poolTitle(cluster, pool) }, poolName(cluster, pool));

export function size(bytes) {
  if (!isKnown(bytes)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit += 1) bytes /= 1024;
  return `${bytes.toFixed(bytes < 10 && unit ? 1 : 0)} ${units[unit]}`;
}

// The rows of a table's body; `none` says why there are none. A row stays in the page while a row has its `data-key`, and a
// cell while it is the same: so a button keeps the focus, and no click is lost, while figures change.
export function fill(id, rows, none) {
  const body = at(id);
  const titles = [...body.parentElement.querySelectorAll("th")].map((title) => title.textContent);
  if (rows.length === 0) rows = [element("tr", {}, element("td", { colspan: titles.length, class: "quiet" }, none))];
  const wanted = new Set(rows.map((row) => row.dataset.key));
  for (const row of [...body.rows]) if (row.dataset.key === undefined || !wanted.has(row.dataset.key)) row.remove();
  const shown = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  let next = body.firstElementChild;
  for (const row of rows) {
    labelCells(row, titles);
    const old = shown.get(row.dataset.key);
    shown.delete(row.dataset.key);
    const kept = old ? renewed(old, row) : row;
    if (kept === next) next = next.nextElementSibling;
    else body.insertBefore(kept, next);
  }
  while (next !== null) {
    const rest = next;
    next = rest.nextElementSibling;
    rest.remove();
  }
}

// On a phone a row is a card, and its cells tell their columns. Then the roles are not those of a table by themselves.
function labelCells(row, titles) {
  row.setAttribute("role", "row");
  [...row.cells].forEach((cell, i) => {
    cell.setAttribute("role", "cell");
    if (cell.colSpan === 1) cell.dataset.label = titles[i];
  });
}

function renewed(old, row) {
  const fresh = [...row.cells];
  [...old.cells].forEach((cell, i) => cell.isEqualNode(fresh[i]) || cell.replaceWith(fresh[i]));
  return old;
}

export const card = (title, value, ...more) =>
  element("div", { class: "card" }, element("span", { class: "quiet" }, title), element("strong", {}, String(value)), ...more);

// The browser's own time of day; with the date if it is not today.
export function clock(ms) {
  const time = new Date(ms);
  const isToday = time.toDateString() === new Date().toDateString();
  return `${isToday ? "" : `${time.toLocaleDateString("sv")} `}${time.toLocaleTimeString("en-GB")}`;
}

// Whether the last point of a pool's history is too old to be told as of now: nobody writes it, or Redis is full.
export function isBehind(pool, cluster) {
  const last = pool.history[pool.history.length - 1];
  return last === undefined || cluster.store_ms - last[0] > 20_000;
}

// Words in which `…` is something to type or to set.
export const marked = (text) => text.split("`").map((part, i) => (i % 2 ? element("code", {}, part) : part));

// A list of what is wrong; `none` says that nothing is.
export const problems = (id, found, none) => at(id).replaceChildren(...(found.length ? found : [element("li", { class: "good" }, none)]));

// Why a request waits.
export const WAITS = {
  no_room: "no replica has room",
  room_share: "its band has used its part of the room (room_share)",
  others_wait: "others wait who go first",
  prefers: "the replica that holds its prompt is full; it waits a little for this one",
  concurrency: "its tenant has as many requests in flight as it may have",
};

// What the words in `why` mean (docs/endpoints.md), of the replica that was chosen. Replicas without room, and those that
// failed the request, are not looked at.
export const WHY = {
  hit: "the policy chose it, and none that was looked at holds more of the prompt",
  partial_hit: "it holds a part of the prompt; another one holds more, but the policy chose this one",
  rebalanced: "another one holds a part of the prompt, but the policy chose this one",
  cold: "the policy chose it, and none that was looked at holds any of the prompt",
  stored: "it loads a part of the prompt from LMCache's tier in Redis",
  pinned: "it belongs to an earlier response, which this replica has",
  last_resort: "no replica was healthy",
  fallback: "Redis did not place it: the gateway chose by hashing",
};

// Where an owner holds a key (gpu, cpu), and how that is known: an engine has said so (resident), or a gateway assumes it
// (claim).
export const ownerOf = (owner) => `${owner.replica} (${owner.medium}, ${owner.stale ? "of an earlier life" : owner.kind})`;

// What each candidate costs, in tokens. The fields have the same names in explain and in the records of requests.
const TERMS = ["cost", "charged_tokens", "displaced_tokens", "backlog_tokens", "load_tokens", "matched_tokens"];
export const costRow = (candidate, chosen) => element("tr", {}, cell(candidate.replica, candidate.replica === chosen ? "good" : ""),
  ...TERMS.map((name) => number(candidate[name] === undefined ? null : Math.round(candidate[name]))));
