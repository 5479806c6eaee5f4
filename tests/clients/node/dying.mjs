// Streams whose engine dies in the middle: node dying.mjs URL KEY MODEL CLIENT. Prints where the answer comes from.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { streamText } from "ai";
import OpenAI from "openai";

const [url, apiKey, model, client] = process.argv.slice(2);
const baseURL = client === "anthropic" ? url : `${url}/v1`;
const telling = async (...asked) => {
  const answer = await fetch(...asked);
  console.log(answer.headers.get("x-moongate-route"));
  return answer;
};
const given = { baseURL, apiKey, fetch: telling };
const messages = [{ role: "user", content: "Say something about caches." }];
const endless = { model, messages, max_tokens: 1_000, ignore_eos: true, stream: true };

const clients = {
  async openai() {
    for await (const chunk of await new OpenAI(given).chat.completions.create(endless)) assert.ok(chunk.choices);
  },
  async anthropic() {
    for await (const event of await new Anthropic(given).messages.create(endless)) assert.ok(event.type);
  },
  async ai() {
    const provider = createOpenAICompatible({ name: "moongate", ...given });
    const providerOptions = { moongate: { ignore_eos: true } };
    const { fullStream } = streamText({ model: provider(model), messages, providerOptions, onError: () => {} });
    for await (const part of fullStream) if (part.type === "error") throw part.error;
  },
};
await assert.rejects(clients[client], (error) => /engine/i.test(error.message ?? error));
