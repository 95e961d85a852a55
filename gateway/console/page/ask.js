// Where a prompt would go, and its answer.

import { WAITS, WHY, at, cell, clock, costRow, counted, element, fill, number, ownerOf } from "./elements.js";

const token = document.querySelector("meta[name=token]").content;
const HEADERS = { "content-type": "application/json", "x-kvgate-csrf": token };
const NOT_EXPLAINED = "Click on Explain to see this.";
let stopper = null; // of the question that runs
let explained = { question: "", sentence: "", ms: 0 }; // what is shown: of which question, and when it was made

export function drawModels(cluster) {
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

async function questionOf(form) {
  const fields = new FormData(form);
  const image = fields.get("image");
  let content = fields.get("prompt");
  if (image && image.size) {
    const part = { type: "image_url", image_url: { url: await asDataUrl(image) } };
    content = [part, { type: "text", text: content }];
  }
  const system = fields.get("system") ? [{ role: "system", content: fields.get("system") }] : [];
  return { model: fields.get("model"), messages: [...system, { role: "user", content }] };
}

const failed = (error) => `The gateway did not answer: ${error}`;

// Begins a question: what was asked before ends, and its answer goes.
function begun() {
  stopper?.abort();
  at("stop").hidden = true;
  for (const id of ["sent", "answer"]) at(id).textContent = "";
  return (stopper = new AbortController());
}

// The explanation goes: it belongs to another prompt.
function clearExplained() {
  explained = { question: "", sentence: "", ms: 0 };
  at("choice").textContent = "";
  fill("costs", [], NOT_EXPLAINED);
  fill("chain", [], NOT_EXPLAINED);
}

async function explain(form) {
  const own = begun();
  clearExplained();
  at("choice").textContent = "looking";
  try {
    const body = JSON.stringify(await questionOf(form));
    const answer = await fetch("/console/explain", { method: "POST", headers: HEADERS, body, signal: own.signal });
    const told = await answer.json();
    if (own !== stopper) return;
    if (answer.ok) {
      drawExplained(told);
      explained = { question: body, sentence: at("choice").textContent, ms: Date.now() };
    } else at("choice").textContent = told.error.message;
  } catch (error) {
    if (own === stopper) at("choice").textContent = failed(error);
  }
}

function drawExplained(told) {
  const choice = told.choice;
  at("choice").textContent = sentenceOf(choice, told.reason) + backendOf(told);
  fill("costs", told.replicas.map((each) => costRow(each, choice.replica)), "No replica was looked at.");
  fill("chain", told.chain.map((link) => element("tr", {}, cell(link.key.slice(0, 12)),
    cell(link.owners.map(ownerOf).join(", ") || (told.store === "up" ? "nobody" : "not known")), number(link.tokens), number(link.images))), "This prompt is too short to have a chain.");
}

function backendOf(told) {
  if (told.backend === undefined) return "";
  const counted = told.backend_by === "count" ? ", if Redis chooses this backend: it counts the requests of each" : "";
  return ` This is of the backend ${told.backend} (weight ${told.backend_weight})${counted}.`;
}

function sentenceOf(choice, reason) {
  if (choice.replica) {
    const waits = choice.waits ? ` But it waits first: ${WAITS[choice.waits.why] ?? choice.waits.why}.` : "";
    return `It would go to ${choice.replica} (${choice.why}): ${WHY[choice.why] ?? choice.why}.${waits}`;
  }
  if (choice.why === "fallback") return `It would go to ${choice.order[0]}, chosen by hashing, because Redis does not decide: ${reason}.`;
  if (choice.why === "held") return `No replica serves this model now. It would wait for one, for ${choice.hold_s} s at most.`;
  return "It would go to no replica.";
}

async function send(form) {
  const own = begun();
  at("sent").textContent = "sent; it waits for its answer";
  at("stop").hidden = false;
  try {
    const question = await questionOf(form);
    if (JSON.stringify(question) === explained.question) at("choice").textContent = `Before it was sent, at ${clock(explained.ms)}: ${explained.sentence}`;
    else clearExplained();
    const body = JSON.stringify({ ...question, stream: true, stream_options: { include_usage: true }, max_tokens: 512 });
    const answer = await fetch("/console/chat", { method: "POST", headers: HEADERS, body, signal: own.signal });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const told = (name) => answer.headers.get(`x-kvgate-${name}`);
    const why = told("decision").split(";")[0];
    at("sent").textContent = `It went to ${told("replica")} (${why}). ${counted(told("matched-tokens"))} tokens were expected in its cache.`;
    const usage = await readAnswer(answer, (text) => at("answer").append(text));
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    if (usage) at("sent").append(` Its engine ${cached === undefined ? "did not say how many it found" : `found ${counted(cached)}`}, of the prompt's ${counted(usage.prompt_tokens)}.`);
  } catch (error) {
    if (own === stopper) at("sent").textContent = own.signal.aborted ? "You stopped it." : error instanceof TypeError ? failed(error) : error.message;
  } finally {
    if (own === stopper) at("stop").hidden = true;
  }
}

// Reads a stream of events as the API sends it; `take` gets each piece of text. Returns the usage, if it was told.
async function readAnswer(answer, take) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let usage;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return usage;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const data of events.filter((each) => each.startsWith("data: ")).map((each) => each.slice(6))) {
      if (data === "[DONE]") return usage;
      const told = JSON.parse(data);
      if (told.error) throw new Error(told.error.message);
      usage = told.usage ?? usage;
      take(told.choices?.[0]?.delta?.content ?? "");
    }
  }
}

export function begin() {
  clearExplained();
  at("question").addEventListener("submit", (event) => {
    event.preventDefault();
    (event.submitter?.value === "send" ? send : explain)(event.target);
  });
  at("stop").addEventListener("click", () => stopper?.abort());
}
