// Checks objects of the Gateway API, a list of which comes on stdin as JSON. Prints a line for each that is wrong.

import { readFileSync } from "node:fs";

for (const object of JSON.parse(readFileSync(0))) {
  const models = await import(`@kubernetes-models/gateway-api/${object.apiVersion}`);
  try {
    new models[object.kind](object).validate();
  } catch (error) {
    console.log(`${object.kind}: ${error.message}`);
  }
}
