// The console. It draws what /console/live tells, and asks nobody else.

import { begin as beginAsk, drawModels } from "./ask.js";
import { addDropped, addRecent, addRecords, drawRecords, lookBack, setTrouble } from "./decisions.js";
import { begin as beginDrain } from "./drain.js";
import { at, clock } from "./elements.js";
import * as figures from "./figures.js";
import { drawFindings, drawOverview } from "./overview.js";
import { drawPrefixes, readPrefixes } from "./prefixes.js";
import { drawQueue } from "./queue.js";
import { drawStatus } from "./status.js";
import { drawStore } from "./store.js";
import { drawUsage, readUsage } from "./usage.js";

const VIEWS = ["overview", "decisions", "prefixes", "queue", "store", "usage", "ask"];
const DRAW = { overview: drawOverview, prefixes: drawPrefixes, queue: drawQueue, store: drawStore, usage: drawUsage, ask: drawModels };
const PREFIXES_MS = 5000;
const USAGE_MS = 60_000;
const SILENT_MS = 8000;
const token = document.querySelector("meta[name=token]").content;
let heardMs = Date.now();
let cluster = null; // as it was told last

const view = () => (VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "overview");

function showView() {
  const wanted = view();
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== wanted;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${wanted}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  tellWhen();
  draw();
  readPrefixes();
  readUsage();
}

// Draws what is seen. What is hidden is drawn when it is shown: a large fleet would keep the browser busy.
function draw() {
  if (cluster === null) return;
  drawStatus(cluster);
  DRAW[view()]?.(cluster);
}

function heard(told) {
  cluster = told;
  heardMs = Date.now();
  at("link").textContent = `${cluster.is_of_now ? "live, from" : "connected to"} ${cluster.gateway}`;
  tellWhen();
  draw();
}

// Tells that what is shown is not of now. What is asked in Ask is.
function tellWhen() {
  const isSilent = Date.now() - heardMs >= SILENT_MS;
  at("health").hidden = isSilent;
  if (isSilent) at("totals").textContent = "";
  at("stale").hidden = view() === "ask" || cluster === null || (cluster.is_of_now && !isSilent);
  if (isSilent) at("stale").textContent = `The gateway does not answer. What is shown is of ${clock(heardMs)} or before.`;
  else if (cluster?.seen_ms) at("stale").textContent = `Redis does not answer. What is shown is of ${clock(cluster.seen_ms)} or before.`;
  else at("stale").textContent = "Redis does not answer. Only what this gateway knows is shown.";
}

function heardTrouble(text) {
  figures.restart(text);
  setTrouble(text);
}

function listen() {
  const source = new EventSource("/console/live");
  const on = (name, take) => source.addEventListener(name, (event) => take(JSON.parse(event.data)));
  source.addEventListener("open", () => { at("link").textContent = "connected"; heardTrouble(""); });
  on("cluster", heard);
  on("doctor", drawFindings);
  on("recent", addRecent);
  on("decisions", (records) => { figures.count(records); addRecords(records); });
  on("dropped", (count) => { figures.countDropped(count); addDropped(count); });
  on("trouble", heardTrouble);
  source.addEventListener("error", () => {
    at("link").textContent = "not connected; trying again";
    if (source.readyState === EventSource.CLOSED) setTimeout(again, 2000);
  });
}

// The stream was refused: the session is over, or too many pages are open.
async function again() {
  const answer = await fetch("/console", { redirect: "manual" }).catch(() => null);
  if (answer && answer.type === "opaqueredirect") location.assign(`/console/login?ended${location.hash}`);
  else listen();
}

// A gateway that hangs keeps the connection open, and says nothing.
function checkSilence() {
  const seconds = Math.round((Date.now() - heardMs) / 1000);
  if (1000 * seconds >= SILENT_MS) at("link").textContent = `nothing heard for ${seconds} s`;
  tellWhen();
}

async function logOut() {
  const answer = await fetch("/console/logout", { method: "POST", headers: { "x-kvgate-csrf": token } }).catch(() => null);
  if (answer && (answer.ok || answer.status === 401)) location.assign("/console/login");
  else at("link").textContent = "not logged out: reload the page, and try again";
}

at("logout").hidden = token === "";
at("logout").addEventListener("click", logOut);
at("filters").addEventListener("input", drawRecords);
at("look-back").addEventListener("submit", lookBack);
at("filters").addEventListener("submit", (event) => event.preventDefault());
at("order").addEventListener("input", draw);
setInterval(readPrefixes, PREFIXES_MS);
setInterval(readUsage, USAGE_MS);
setInterval(checkSilence, 1000);
window.addEventListener("hashchange", showView);
beginAsk();
beginDrain();
showView();
drawRecords();
listen();
