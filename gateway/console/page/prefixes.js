// The prefixes that were used last. They are asked for only while this view is seen.

import { at, cell, clock, counted, element, fill, number, ownerOf, poolName } from "./elements.js";

const MOST_SHOWN = 50;
let prefixes = null; // not read yet

export async function readPrefixes() {
  if (at("prefixes").hidden || document.hidden) return;
  try {
    const answer = await fetch("/console/prefixes");
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.error.message);
    prefixes = told.prefixes;
    at("found").textContent = `${prefixes.length} keys, of those that replicas used last, as of ${clock(Date.now())}${prefixes.length > MOST_SHOWN ? `; the first ${MOST_SHOWN} are shown` : ""}.`;
  } catch (error) {
    at("found").textContent = `They cannot be read: ${error.message}`;
  }
}

export function drawPrefixes(cluster) {
  const by = new FormData(at("order")).get("by");
  const sorted = [...(prefixes ?? [])].sort((a, b) => (b[by] ?? -1) - (a[by] ?? -1));
  fill("keys", sorted.slice(0, MOST_SHOWN).map((prefix) => rowOf(prefix, cluster)), prefixes ? "No replica holds anything yet." : "Not read yet.");
}

function ago(ms) {
  const seconds = Math.max(0, Math.round((Date.now() - ms) / 1000));
  if (seconds < 60) return `${seconds} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  return seconds < 86_400 ? `${Math.floor(seconds / 3600)} h ago` : `${Math.floor(seconds / 86_400)} days ago`;
}

// A prefix has no name, and its text is not known here: its model, its size and when it was used last tell it from others.
function named(prefix, cluster) {
  const size = prefix.tokens === null ? "size not known" : `${counted(prefix.tokens)} tokens`;
  const words = [poolName(cluster, prefix.pool), size, ago(prefix.last_use_ms)].join(" · ");
  return element("td", { class: "long", title: `pool ${prefix.pool}, last used at ${clock(prefix.last_use_ms)}` }, `${words} `, element("code", {}, prefix.key.slice(0, 12)));
}

function rowOf(prefix, cluster) {
  const since = Math.round((Date.now() - prefix.since_ms) / 1000);
  const holders = prefix.owners.map(ownerOf).join(", ");
  const others = prefix.copies - prefix.owners.length;
  return element("tr", { "data-key": `${prefix.pool} ${prefix.key}` }, named(prefix, cluster), number(prefix.hits), number(prefix.copies),
    cell(others > 0 ? `${holders}, and ${others} more` : holders, "long"), cell(prefix.hits_since ? `+${prefix.hits_since} in ${since} s` : "–", "number"),
    number(prefix.copies_lost));
}
