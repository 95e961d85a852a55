// The records of requests of all gateways, as they end.

import { WHY, at, cell, clock, costRow, duration, element, fill, number } from "./elements.js";
import { isBroken } from "./figures.js";

const MOST_KEPT = 300;
const MOST_SHOWN = 100;
// What the map did for a request: it saved work, it was overruled or did not choose, or it could not help.
const WHY_CLASSES = { hit: "good", partial_hit: "good", stored: "good", pinned: "note", rebalanced: "note", cold: "quiet", fallback: "warn", last_resort: "bad" };
const FILTERS = ["model", "replica", "why", "tenant", "request_id"];
let records = []; // the newest first
let dropped = 0;
let trouble = "";

export function addRecords(added) {
  if (at("filters").elements.paused.checked) return;
  keep([...added.reverse(), ...records]);
}

function keep(all) {
  records = all.slice(0, MOST_KEPT);
  drawRecords();
}

const nameOf = (record) => [record.gateway, record.request_id, record.time].join(" ");

// What came before to pages of this gateway.
export function addRecent(recent) {
  const known = new Set(records.map(nameOf));
  const added = recent.filter((record) => !known.has(nameOf(record)));
  keep([...records, ...added].sort((a, b) => Date.parse(b.time) - Date.parse(a.time)));
}

export function addDropped(count) {
  dropped += count;
  drawRecords();
}

export function setTrouble(text) {
  trouble = text;
  drawRecords();
}

export function drawRecords() {
  const filters = new FormData(at("filters"));
  const wanted = FILTERS.map((name) => [name, (filters.get(name) ?? "").trim()]).filter(([, value]) => value);
  const shown = records.filter((record) => wanted.every(([name, value]) => String(record[name] ?? "").includes(value)));
  fill("records", shown.slice(0, MOST_SHOWN).map(rowOf), records.length ? "No request matches the filters." : trouble ? "Not known." : "No request has ended since a page was opened at this gateway. Send one in Ask.");
  const told = trouble ? ` None come now: ${trouble}.` : "";
  at("counts").textContent = `${records.length} kept, ${shown.length} match${shown.length > MOST_SHOWN ? `, the newest ${MOST_SHOWN} are shown` : ""}, ${dropped} left out because they were too many.${told}`;
}

function statusOf(record) {
  const className = record.status >= 500 || isBroken(record) ? "number bad" : record.status >= 400 ? "number warn" : "number";
  return element("td", { class: className, title: record.code ?? "" }, isBroken(record) ? `${record.status}, broken` : String(record.status));
}

// The replicas that it had before: too late with the first byte, or they broke the answer off. (kvgate watch says the same.)
function marksOf(record) {
  const left = (record.resumed ?? []).map(({ how, replica }) => `${how === "none" ? "broken" : "resumed"}=${replica}`);
  const before = ["hedged", "prefill"].filter((name) => record[name]).map((name) => `${name}=${record[name]}`);
  return [...before, ...left];
}

function rowOf(record) {
  const time = (value) => cell(duration(value), "number");
  const row = element("tr", { tabindex: 0, "data-key": nameOf(record), "data-request": record.request_id }, cell(clock(Date.parse(record.time))),
    cell(record.replica), cell([record.why ?? "–", ...marksOf(record)].join(" "), WHY_CLASSES[record.why]), statusOf(record), number(record.prompt_tokens), number(record.matched_tokens),
    number(record.cached_tokens), time(record.waited_ms), time(record.first_byte_ms), time(record.duration_ms), cell(record.tenant),
    cell(record.model, "long"), cell(record.gateway), cell(record.request_id, "long id"));
  row.addEventListener("click", () => showRecord(record));
  row.addEventListener("keydown", (event) => event.key === "Enter" && showRecord(record));
  return row;
}

// A request that ended before this page was opened: Redis keeps the last ones.
export async function lookBack(event) {
  event.preventDefault();
  const id = at("look-back").elements.request_id.value.trim();
  at("looked-back").textContent = "";
  try {
    const answer = await fetch(`/console/decisions/${encodeURIComponent(id)}`);
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.error.message);
    if (told.decisions.length > 1) at("looked-back").textContent = `${told.decisions.length} requests had this id; the last one is shown.`;
    showRecord(told.decisions[0]);
  } catch (error) {
    at("looked-back").textContent = error.message;
  }
}

function showRecord(record) {
  at("because").textContent = record.replica ? `It went to ${record.replica}: ${WHY[record.why] ?? record.why}.` : "It went to no replica.";
  const rows = Object.entries(record).filter(([name]) => name !== "costs").flatMap(([name, value]) =>
    [element("dt", {}, name), element("dd", {}, value === null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value))]);
  at("record").querySelector("dl").replaceChildren(...rows);
  fill("considered", (record.costs ?? []).map((candidate) => costRow(candidate, record.replica)),
    "Not told: only a part of requests tells it (decisions.cost_share) while nobody watches, or Redis did not place it.");
  at("record").showModal();
}
