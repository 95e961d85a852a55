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
export const percent = (value) => (isKnown(value) ? `${Math.round(100 * value)} %` : "–");
export const cell = (text, className = "") => element("td", className ? { class: className } : {}, text ?? "–");
export const number = (value) => cell(counted(value), "number");

export function size(bytes) {
  if (!isKnown(bytes)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit += 1) bytes /= 1024;
  return `${bytes.toFixed(bytes < 10 && unit ? 1 : 0)} ${units[unit]}`;
}

// The rows of a table's body; `none` says why there are none.
export function fill(id, rows, none) {
  const body = at(id);
  if (rows.length === 0) {
    const columns = body.parentElement.querySelectorAll("th").length;
    rows = [element("tr", {}, element("td", { colspan: columns, class: "quiet" }, none))];
  }
  body.replaceChildren(...rows);
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
