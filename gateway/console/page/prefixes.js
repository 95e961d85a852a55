// The prefixes that were used last. They are asked for only while this view is seen.

import { at, cell, clock, element, fill, number, ownerOf } from "./elements.js";

const MOST_SHOWN = 50;
let prefixes = [];

export async function readPrefixes() {
  if (at("prefixes").hidden || document.hidden) return;
  try {
    const answer = await fetch("/console/prefixes");
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.error.message);
    prefixes = told.prefixes;
    at("found").textContent = `${prefixes.length} keys, of those that replicas used last, as of ${clock(Date.now())}${prefixes.length > MOST_SHOWN ? `; the first ${MOST_SHOWN} are shown` : ""}.`;
    drawPrefixes();
  } catch (error) {
    at("found").textContent = `They cannot be read: ${error.message}`;
  }
}

export function drawPrefixes() {
  const by = new FormData(at("order")).get("by");
  const sorted = [...prefixes].sort((a, b) => (b[by] ?? -1) - (a[by] ?? -1));
  fill("keys", sorted.slice(0, MOST_SHOWN).map(rowOf), "No replica holds anything yet.");
}

function rowOf(prefix) {
  const since = Math.round((Date.now() - prefix.since_ms) / 1000);
  const holders = prefix.owners.map(ownerOf).join(", ");
  const others = prefix.copies - prefix.owners.length;
  return element("tr", {}, cell(prefix.key.slice(0, 12)), number(prefix.tokens), number(prefix.hits), number(prefix.copies),
    cell(others > 0 ? `${holders}, and ${others} more` : holders), cell(prefix.hits_since ? `+${prefix.hits_since} in ${since} s` : "–", "number"),
    number(prefix.copies_lost), cell(clock(prefix.last_use_ms)), cell(prefix.pool));
}
