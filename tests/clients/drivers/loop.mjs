// A driver's loop, in Node. loop.py describes its input and output.

import { createInterface } from "node:readline";

// Answer until the input ends. A call returns a promise of a value, or an async iterator of a stream's pieces.
export async function serve(connect, calls) {
  for await (const line of createInterface({ input: process.stdin })) {
    const { call, url, key, headers, ...question } = JSON.parse(line);
    try {
      say({ value: await value(calls[call](connect(url, key, headers), question)) });
    } catch (error) {
      say({ raised: described(error) });
    }
  }
}

async function value(found) {
  if (found?.[Symbol.asyncIterator] === undefined) return await found;
  const pieces = [];
  for await (const piece of found) {
    if (pieces.length === 0) say({ begun: true });
    pieces.push(piece);
  }
  return pieces;
}

function described(error) {
  const kinds = [];
  for (let kind = Object.getPrototypeOf(error); kind !== null; kind = Object.getPrototypeOf(kind)) {
    kinds.push(kind.constructor.name);
  }
  const status = error.status ?? error.statusCode ?? null;
  return { kinds, message: error.message, status, request_id: error.requestID ?? null };
}

function say(fields) {
  process.stdout.write(JSON.stringify(fields) + "\n");
}
