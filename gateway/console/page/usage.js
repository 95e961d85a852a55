// What requests of this month took and cost, and the budgets. They are asked for only while this view is seen.

import { at, barCell, cell, element, fill, number } from "./elements.js";

let usage = null; // not read yet
let spending = null;

export async function readUsage() {
  if (at("usage").hidden || document.hidden) return;
  await Promise.all([read("usage", "billed", tellUsage), read("budgets", "budgeted", tellBudgets)]);
}

async function read(what, place, tell) {
  try {
    const answer = await fetch(`/console/${what}`);
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.error.message);
    at(place).textContent = tell(told);
  } catch (error) {
    at(place).textContent = `It cannot be read: ${error.message}`;
  }
}

function tellUsage(told) {
  usage = told;
  return `${told.totals.requests.toLocaleString("en")} requests have cost ${money(told.totals.cost)} ${told.currency} since ${told.from} began (${told.time_zone}); without caches, they would have cost ${money(told.totals.saved)} more.`;
}

function tellBudgets(told) {
  spending = told;
  return told.budgets.length ? `Times are of ${told.time_zone}.${told.more ? ` ${told.more} more, of which less is used: kvgate budgets.` : ""}` : "";
}

const money = (amount) => amount.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 6 });

export function drawUsage() {
  const rows = [...(usage?.rows ?? [])].sort((a, b) => b.cost - a.cost || b.requests - a.requests);
  fill("bills", rows.map(rowOf), usage ? "No requests yet." : "Not read yet.");
  fill("budgets", (spending?.budgets ?? []).map(budgetRow), spending ? "Nobody has a budget." : "Not read yet.");
}

function budgetRow(budget) {
  const isMoney = budget.unit === "money";
  const amount = (value) => isMoney ? money(value) : value.toLocaleString("en");
  const text = `${amount(budget.spent)} of ${amount(budget.budget)} ${isMoney ? spending.currency : "tokens"}`;
  return element("tr", { "data-key": `${budget.tenant} ${budget.key_id ?? ""} ${budget.per} ${budget.unit}` }, cell(budget.tenant), cell(budget.key ?? "all"), cell(budget.per),
    barCell("spent", budget.spent, budget.budget, text, budget.soft), cell(amount(budget.reserved), "number"), stateOf(budget), cell(budget.opens_again.slice(0, 16).replace("T", " ")));
}

function stateOf(budget) {
  if (budget.spent >= budget.budget) return cell("used up", "bad");
  if (budget.left <= 0) return cell("all reserved", "warn");
  const isSoft = budget.spent + budget.reserved >= budget.soft * budget.budget;
  return isSoft ? cell(`soft limit reached (${Math.round(100 * budget.soft)} %)`, "warn") : cell("open", "good");
}

function rowOf(row) {
  const counts = ["requests", "errors", "uncached_tokens", "cached_tokens", "output_tokens"].map((name) => number(row[name]));
  return element("tr", { "data-key": `${row.tenant} ${row.model}` }, cell(row.tenant || "–"), cell(row.model || "–", "long"), ...counts, cell(money(row.cost), "number"), cell(money(row.saved), "number"));
}
