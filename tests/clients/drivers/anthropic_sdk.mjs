// The official Anthropic SDK for Node: whole messages, streams, and streams through the SDK's own helper.

import Anthropic from "@anthropic-ai/sdk";
import { serve } from "./loop.mjs";

const connect = (baseURL, apiKey, defaultHeaders) =>
  new Anthropic({ baseURL, apiKey, defaultHeaders, maxRetries: 0, timeout: 60_000 });

const body = ({ model, prompt, tokens }) => ({
  model,
  messages: [{ role: "user", content: prompt }],
  max_tokens: tokens,
});

async function* texts(events) {
  for await (const event of events) {
    if (event.type === "content_block_delta") yield event.delta.text;
  }
}

await serve(connect, {
  async messages(client, asked) {
    const answer = await client.messages.create(body(asked));
    return { text: answer.content[0].text, request_id: answer._request_id };
  },

  async *messages_stream(client, asked) {
    yield* texts(await client.messages.create({ ...body(asked), stream: true }));
  },

  async *messages_helper(client, asked) {
    const stream = client.messages.stream(body(asked));
    yield* texts(stream);
    await stream.finalMessage();
  },
});
