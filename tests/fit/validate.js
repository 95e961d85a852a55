// Checks objects of the Gateway API and of GKE, a list of which comes on stdin as JSON. Prints a line for each that is wrong.

import { readFileSync } from "node:fs";

const packages = { "gateway.networking.k8s.io": "gateway-api", "networking.gke.io": "gke" };

for (const object of JSON.parse(readFileSync(0))) {
  const [group] = object.apiVersion.split("/");
  const models = await import(`@kubernetes-models/${packages[group]}/${object.apiVersion}`);
  try {
    new models[object.kind](object).validate();
  } catch (error) {
    console.log(`${object.kind}: ${error.message}`);
  }
}
