// Vercel's AI SDK, with its provider for servers that speak OpenAI's API.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";
import { serve } from "./loop.mjs";

const Person = z.object({ name: z.string(), age: z.number().int() });

const connect = (url, apiKey, headers) =>
  createOpenAICompatible({ name: "kvgate", baseURL: `${url}/v1`, apiKey, headers, supportsStructuredOutputs: true });

const question = (provider, { model, prompt, tokens }) => ({
  model: provider(model),
  prompt,
  maxOutputTokens: tokens,
  maxRetries: 0,
});

await serve(connect, {
  async plain(provider, asked) {
    return (await generateText(question(provider, asked))).text;
  },

  async *stream(provider, asked) {
    // Errors are parts of this stream; `textStream` leaves them out.
    const { fullStream } = streamText({ ...question(provider, asked), onError: () => {} });
    for await (const part of fullStream) {
      if (part.type === "error") throw part.error;
      if (part.type === "text-delta") yield part.text;
    }
  },

  async structured(provider, asked) {
    return (await generateText({ ...question(provider, asked), output: Output.object({ schema: Person }) })).output;
  },

  async tool(provider, asked) {
    const tools = { Person: tool({ description: "Who it is about.", inputSchema: Person }) };
    const { toolCalls } = await generateText({ ...question(provider, asked), tools, toolChoice: "required" });
    return { name: toolCalls[0].toolName, arguments: toolCalls[0].input };
  },

  async embedding(provider, { model, prompt }) {
    return (await embed({ model: provider.textEmbeddingModel(model), value: prompt, maxRetries: 0 })).embedding;
  },
});
