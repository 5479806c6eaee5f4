// The Vercel AI SDK, unchanged: node ai.mjs URL KEY MODEL
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

const [url, apiKey, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "moongate", baseURL: `${url}/v1`, apiKey, includeUsage: true });
const model = provider(name);
const prompt = "Say something about caches.";
const inputSchema = jsonSchema({
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
  required: ["city", "days"],
});
const asked = [];
const tools = { weather: tool({ inputSchema, execute: async (given) => asked.push(given) && "Rain." }) };

const whole = await generateText({ model, prompt, maxOutputTokens: 12 });
assert.ok(whole.text);
const stream = streamText({ model, prompt, maxOutputTokens: 12 });
let text = "";
for await (const piece of stream.textStream) text += piece;
assert.equal(text, whole.text);
assert.equal((await stream.usage).outputTokens, 12);

// Two calls, each rebuilt from its pieces: one is insisted on in each of two steps
const calling = streamText({ model, prompt, tools, toolChoice: "required", stopWhen: stepCountIs(2) });
const pieces = [];
for await (const part of calling.fullStream) {
  assert.notEqual(part.type, "error", String(part.error));
  if (part.type === "tool-input-delta") pieces.push(part.id);
}
const calls = (await calling.steps).flatMap((step) => step.toolCalls);
assert.deepEqual(calls.map((call) => call.toolName), ["weather", "weather"]);
assert.deepEqual(calls.map((call) => call.input), asked);
assert.equal(new Set(calls.map((call) => call.toolCallId)).size, 2);
assert.ok(calls.every((call) => pieces.filter((id) => id === call.toolCallId).length > 1));

// Of its own accord the model calls once, then answers
const loop = streamText({ model, prompt, tools, stopWhen: stepCountIs(5) });
assert.ok(await loop.text);
assert.equal((await loop.steps).length, 2);

const formed = createOpenAICompatible({
  name: "moongate",
  baseURL: `${url}/v1`,
  apiKey,
  supportsStructuredOutputs: true,
})(name);
const { output } = await generateText({ model: formed, prompt, output: Output.object({ schema: inputSchema }) });
assert.equal(typeof output.days, "number");
const { embeddings } = await embedMany({ model: provider.embeddingModel(name), values: ["one text", "another"] });
assert.equal(embeddings.length, 2);
await assert.rejects(generateText({ model: provider("nobody"), prompt }), (error) => {
  assert.ok(APICallError.isInstance(error));
  assert.deepEqual([error.statusCode, error.isRetryable], [404, false]);
  return true;
});
