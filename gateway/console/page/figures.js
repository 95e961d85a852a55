// What the records of requests tell of the last minute: of all gateways, of each replica, and of each backend of a model. A page counts from the time
// when it was connected, because gateways send records only while somebody watches.

const WINDOW_MS = 60_000;
const HEARD_MS = 1000; // so long after that, all gateways know that somebody watches
const MOST_KEPT = 50_000;
let sinceMs = Infinity; // nothing is counted that came before; Infinity: nothing comes
let seen = []; // the oldest first

// Counts anew: from now on, or not at all while a trouble keeps the records away.
export function restart(trouble) {
  sinceMs = trouble ? Infinity : Date.now() + HEARD_MS;
  seen = [];
}

export const isBroken = (record) => record.status < 400 && Boolean(record.code); // its answer began, and ended with an error
const hasFailed = (record) => record.status >= 500 || isBroken(record);

function add(added) {
  const ms = Date.now();
  if (ms < sinceMs) return;
  for (const each of added) seen.push({ ms, ...each });
  if (seen.length <= MOST_KEPT) return;
  seen = seen.slice(-MOST_KEPT);
  sinceMs = seen[0].ms;
}

// Of an answer whose cached tokens are not known, neither count is used.
function countsOf(record) {
  const isTold = typeof record.cached_tokens === "number";
  return {
    replica: record.replica, model: record.placed_as, backend: record.backend, requests: 1, errors: hasFailed(record) ? 1 : 0,
    firstByteMs: record.first_byte_ms, promptTokens: isTold ? record.prompt_tokens : 0, cachedTokens: isTold ? record.cached_tokens : 0,
  };
}

export const count = (records) => add(records.map(countsOf));
export const countDropped = (dropped) => add([{ dropped }]); // gateways leave out what is too much

const sum = (of, name) => of.reduce((total, each) => total + (each[name] ?? 0), 0);

function median(values) {
  const sorted = values.sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

// The figures; those that nobody knows are null. If records were left out, the others stand for them.
export function lastMinute() {
  const now = Date.now();
  const from = Math.max(sinceMs, now - WINDOW_MS);
  seen = seen.filter((each) => each.ms >= from);
  const isKnown = from < now;
  const told = sum(seen, "requests");
  const weight = told ? (told + sum(seen, "dropped")) / told : 1;
  const perS = (requests) => (isKnown ? (weight * requests) / Math.max(1, (now - from) / 1000) : null);
  const figuresOf = (own) => {
    const firstBytes = own.map((each) => each.firstByteMs).filter((ms) => typeof ms === "number");
    const promptTokens = sum(own, "promptTokens");
    return {
      requestsPerS: perS(own.length),
      ttftMs: isKnown ? median(firstBytes) : null,
      errors: isKnown ? Math.round(weight * sum(own, "errors")) : null,
      cached: promptTokens ? sum(own, "cachedTokens") / promptTokens : null,
    };
  };
  return {
    seconds: isKnown ? Math.round((now - from) / 1000) : null,
    isWhole: isKnown && from > sinceMs,
    isEstimated: weight > 1,
    requestsPerS: perS(told),
    of: (replica) => figuresOf(seen.filter((each) => each.replica === replica)),
    ofBackend: (model, backend) => figuresOf(seen.filter((each) => each.model === model && each.backend === backend)),
  };
}
