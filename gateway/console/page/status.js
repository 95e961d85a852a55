// How the cluster is, in one line; and what is wrong with it.

import { at, clock, rate } from "./elements.js";
import { lastMinute } from "./figures.js";

let findings = []; // of the doctor

export const setFindings = (found) => { findings = found; };

export function stateOf(replica) {
  if (replica.breaker_open) return ["breaker open", "bad"];
  if (replica.state === "draining" && replica.active_requests === 0 && replica.keys === 0) return ["drained", "warn"];
  const classes = { ready: "good", draining: "warn", asleep: "warn" };
  return [replica.state, classes[replica.state] ?? "bad"];
}

const AGENTS = {
  exact: ["tells what it holds", "good"],
  relearning: ["relearning", "warn"],
  partial: ["events tell only what is gone", "warn"],
  unconfirmed: ["events do not tell of prefixes", "warn"],
  gone: ["its agent is gone", "bad"],
  none: ["claims only", "quiet"],
};

// What its agent tells counts only while the replica works.
export function agentOf(replica) {
  if (stateOf(replica)[1] === "bad") return ["nothing to tell", "quiet"];
  return AGENTS[replica.agent] ?? ["not known", "quiet"];
}

// In words, each with a class: `bad`, or `warn` for what works, or was wanted. The worst first.
export function problemsOf(cluster) {
  const states = new Map(cluster.replicas.map((replica) => [`replica ${replica.id}`, stateOf(replica)]));
  const conditions = Object.values(cluster.report.conditions ?? {});
  const found = cluster.problems.map(({ where, what }) => [`${where}: ${what}`, states.get(where)?.[1] === "warn" || conditions.includes(what) ? "warn" : "bad"]);
  for (const gateway of cluster.lost_gateways) {
    found.push([`gateway ${gateway.id}: its lease ran out at ${clock(gateway.at_ms)}, and it is not back: it died, or does not reach Redis`, "bad"]);
  }
  for (const gateway of cluster.gateways) {
    if (gateway.is_alive === false) found.push([`gateway ${gateway.id}: its lease has run out`, "bad"]);
  }
  for (const [where, [state, className]] of states) {
    if (className === "bad" && !cluster.problems.some((problem) => problem.where === where)) found.push([`${where}: ${state}`, "bad"]);
  }
  for (const replica of cluster.replicas) {
    const [agent, className] = agentOf(replica);
    if (replica.agent === "gone" && className !== "quiet") found.push([`agent of ${replica.id}: ${agent}`, className]);
  }
  return found.sort(([, a], [, b]) => (a === "warn") - (b === "warn"));
}

// In words, with a class. What the doctor finds is told if nothing else is wrong: much of it is the same.
function healthOf(problems) {
  const [[worst, className] = []] = problems;
  if (worst) return [problems.length === 1 ? worst : `${problems.length} problems, the worst: ${worst}`, className];
  const finding = findings.find((each) => each.severity === "error") ?? findings[0];
  if (finding) return [`The doctor found ${findings.length === 1 ? "something" : `${findings.length} things`}: ${finding.subject}: ${finding.what}`, finding.severity === "error" ? "bad" : "warn"];
  return ["All is well", "good"];
}

function totalsOf(cluster) {
  const ready = cluster.replicas.filter((replica) => stateOf(replica)[0] === "ready").length;
  const gateways = cluster.gateways.filter((gateway) => gateway.is_alive).length;
  const waiting = cluster.pools.reduce((sum, pool) => sum + pool.waiting_requests, 0);
  const perS = lastMinute().requestsPerS;
  return [`${ready} of ${cluster.replicas.length} replicas ready`, `${gateways} ${gateways === 1 ? "gateway" : "gateways"}`,
    ...(perS === null ? [] : [`${rate(perS)} requests/s`]), `${waiting} waiting`].join(" · ");
}

export function drawStatus(cluster) {
  const [words, className] = healthOf(problemsOf(cluster));
  // A screen reader tells each change: not twice a second what is the same.
  const plain = words.replaceAll("`", "");
  if (at("health").textContent !== plain) at("health").textContent = plain;
  at("status").className = `status ${className}`;
  at("totals").textContent = cluster.is_of_now ? totalsOf(cluster) : "";
}
