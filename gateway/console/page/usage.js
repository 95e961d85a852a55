// What requests of this month took and cost. It is asked for only while this view is seen.

import { at, cell, element, fill, number } from "./elements.js";

let usage = null; // not read yet

export async function readUsage() {
  if (at("usage").hidden || document.hidden) return;
  try {
    const answer = await fetch("/console/usage");
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.error.message);
    usage = told;
    at("billed").textContent = `${told.totals.requests.toLocaleString("en")} requests have cost ${money(told.totals.cost)} ${told.currency} since ${told.from} began (${told.time_zone}); without caches, they would have cost ${money(told.totals.saved)} more.`;
  } catch (error) {
    at("billed").textContent = `It cannot be read: ${error.message}`;
  }
}

const money = (amount) => amount.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 6 });

export function drawUsage() {
  const rows = [...(usage?.rows ?? [])].sort((a, b) => b.cost - a.cost || b.requests - a.requests);
  fill("bills", rows.map(rowOf), usage ? "No requests yet." : "Not read yet.");
}

function rowOf(row) {
  const counts = ["requests", "errors", "uncached_tokens", "cached_tokens", "output_tokens"].map((name) => number(row[name]));
  return element("tr", { "data-key": `${row.tenant} ${row.model}` }, cell(row.tenant || "–"), cell(row.model || "–", "long"), ...counts, cell(money(row.cost), "number"), cell(money(row.saved), "number"));
}
