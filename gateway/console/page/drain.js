// Takes a replica out of service, and back: as `kvgate drain` does.

import { at, element } from "./elements.js";

const token = document.querySelector("meta[name=token]").content;
const HEADERS = { "content-type": "application/json", "x-kvgate-csrf": token };
let asked = ""; // the replica that the dialog is about

// The button of one replica. Redis says whether it is drained: without Redis, nobody knows.
export function drainButton(replica, isOfNow) {
  const isDrained = typeof replica.drained_since_ms === "number";
  return element("button", { "data-replica": replica.id, "data-action": isDrained ? "undrain" : "drain", "aria-label": isDrained ? `Serve again: ${replica.id}` : `Drain ${replica.id}`, ...(isOfNow ? {} : { disabled: "" }) }, isDrained ? "Serve again" : "Drain");
}

async function act(replica, action) {
  try {
    const answer = await fetch(`/console/replicas/${encodeURIComponent(replica)}/${action}`, { method: "POST", headers: HEADERS });
    if (!answer.ok) {
      at("acted").textContent = `Nothing was changed at ${replica}: ${(await answer.json()).error.message}`;
      return;
    }
    at("acted").textContent = action === "drain" ? `${replica} gets no new requests.` : `${replica} gets requests again.`;
  } catch (error) {
    at("acted").textContent = `It is not known whether ${replica} was changed, see its state: ${error.message}`;
  }
}

export function begin() {
  at("replicas").addEventListener("click", (event) => {
    const { replica, action } = event.target.dataset;
    if (action === "undrain") act(replica, action);
    if (action !== "drain") return;
    asked = replica;
    at("drain-title").textContent = `Drain ${replica}?`;
    at("drain").returnValue = "";
    at("drain").showModal();
  });
  at("drain").addEventListener("close", () => at("drain").returnValue === "drain" && act(asked, "drain"));
}
