// Where a prompt would go, and its answer.

import { at, cell, costRow, element, fill, number, ownerOf } from "./elements.js";

const token = document.querySelector("meta[name=token]").content;
const HEADERS = { "content-type": "application/json", "x-kvgate-csrf": token };
let stopper = null;

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

async function bodyOf(form, more) {
  const fields = new FormData(form);
  const image = fields.get("image");
  let content = fields.get("prompt");
  if (image && image.size) {
    const part = { type: "image_url", image_url: { url: await asDataUrl(image) } };
    content = [part, { type: "text", text: content }];
  }
  const system = fields.get("system") ? [{ role: "system", content: fields.get("system") }] : [];
  return JSON.stringify({ model: fields.get("model"), messages: [...system, { role: "user", content }], ...more });
}

const failed = (error) => `The gateway did not answer: ${error}`;

async function explain(form) {
  at("choice").textContent = "asking";
  try {
    const answer = await fetch("/console/explain", { method: "POST", headers: HEADERS, body: await bodyOf(form, {}) });
    const told = await answer.json();
    if (answer.ok) drawExplained(told);
    else at("choice").textContent = told.error.message;
  } catch (error) {
    at("choice").textContent = failed(error);
  }
}

function drawExplained(told) {
  const choice = told.choice;
  const waits = choice.waits ? `, but it waits first (${choice.waits.why})` : "";
  at("choice").textContent = choice.replica
    ? `It would go to ${choice.replica}: ${choice.why}, ${choice.matched_tokens} of ${told.prompt_tokens} tokens matched${waits}.`
    : `${choice.why}${told.reason ? `: ${told.reason}` : ""}`;
  fill("costs", told.replicas.map((each) => costRow(each, choice.replica)), "No replica was looked at.");
  fill("chain", told.chain.map((link) => element("tr", {}, cell(link.key.slice(0, 12)), number(link.tokens), number(link.images),
    cell(link.owners.map(ownerOf).join(", ") || "nobody"))), "This prompt is too short to have a chain.");
}

async function send(form) {
  stopper?.abort();
  const own = (stopper = new AbortController());
  at("sent").textContent = "sending";
  at("answer").textContent = "";
  at("stop").hidden = false;
  try {
    const body = await bodyOf(form, { stream: true, max_tokens: 512 });
    const answer = await fetch("/console/chat", { method: "POST", headers: HEADERS, body, signal: own.signal });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    at("sent").textContent = `${answer.headers.get("x-kvgate-replica")}: ${answer.headers.get("x-kvgate-decision")}`;
    await readAnswer(answer, (text) => at("answer").append(text));
  } catch (error) {
    if (own === stopper) at("sent").textContent = own.signal.aborted ? "stopped" : error instanceof TypeError ? failed(error) : error.message;
  } finally {
    if (own === stopper) at("stop").hidden = true;
  }
}

// Reads a stream of events as the API sends it; `take` gets each piece of text.
async function readAnswer(answer, take) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const data of events.filter((each) => each.startsWith("data: ")).map((each) => each.slice(6))) {
      if (data === "[DONE]") return;
      const told = JSON.parse(data);
      if (told.error) throw new Error(told.error.message);
      take(told.choices?.[0]?.delta?.content ?? "");
    }
  }
}

export function begin() {
  fill("costs", [], "Nothing is explained yet.");
  fill("chain", [], "Nothing is explained yet.");
  at("question").addEventListener("submit", (event) => {
    event.preventDefault();
    (event.submitter?.value === "send" ? send : explain)(event.target);
  });
  at("stop").addEventListener("click", () => stopper?.abort());
}
