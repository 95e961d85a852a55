// The official OpenAI SDK for Node: on each API whole answers, streams, and streams through the SDK's own helper.

import OpenAI from "openai";
import { serve } from "./loop.mjs";

const connect = (url, apiKey, defaultHeaders) =>
  new OpenAI({ baseURL: `${url}/v1`, apiKey, defaultHeaders, maxRetries: 0, timeout: 60_000 });

const chatBody = ({ model, prompt, tokens }) => ({
  model,
  messages: [{ role: "user", content: prompt }],
  max_tokens: tokens,
});
const completionBody = ({ model, prompt, tokens }) => ({ model, prompt, max_tokens: tokens });
const responseBody = ({ model, prompt, tokens }) => ({ model, input: prompt, max_output_tokens: tokens });

await serve(connect, {
  async chat(client, asked) {
    const answer = await client.chat.completions.create(chatBody(asked));
    return { text: answer.choices[0].message.content, request_id: answer._request_id };
  },

  async *chat_stream(client, asked) {
    for await (const chunk of await client.chat.completions.create({ ...chatBody(asked), stream: true })) {
      const text = chunk.choices[0].delta.content;
      if (text) yield text;
    }
  },

  async *chat_helper(client, asked) {
    const stream = client.chat.completions.stream(chatBody(asked));
    for await (const chunk of stream) {
      const text = chunk.choices[0].delta.content;
      if (text) yield text;
    }
    await stream.finalChatCompletion();
  },

  async completions(client, asked) {
    const answer = await client.completions.create(completionBody(asked));
    return { text: answer.choices[0].text, request_id: answer._request_id };
  },

  async *completions_stream(client, asked) {
    for await (const chunk of await client.completions.create({ ...completionBody(asked), stream: true })) {
      yield chunk.choices[0].text;
    }
  },

  async responses(client, asked) {
    const answer = await client.responses.create(responseBody(asked));
    return { text: answer.output_text, request_id: answer._request_id };
  },

  async *responses_stream(client, asked) {
    for await (const event of await client.responses.create({ ...responseBody(asked), stream: true })) {
      if (event.type === "response.output_text.delta") yield event.delta;
    }
  },

  async *responses_helper(client, asked) {
    for await (const event of client.responses.stream(responseBody(asked))) {
      if (event.type === "response.output_text.delta") yield event.delta;
    }
  },
});
