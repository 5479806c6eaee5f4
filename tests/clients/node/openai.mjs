// OpenAI's Node SDK, unchanged: node openai.mjs URL KEY MODEL
import assert from "node:assert/strict";
import { Readable } from "node:stream";
import OpenAI, { toFile } from "openai";

const [url, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey });
const messages = [{ role: "user", content: "Say something about caches." }];
const place = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
  required: ["city", "days"],
  additionalProperties: false,
};
const weather = { name: "weather", description: "The weather to come.", parameters: place };

// Chat
const whole = await client.chat.completions.create({ model, messages, max_tokens: 12 });
assert.ok(whole.choices[0].message.content);
assert.equal(whole.usage.completion_tokens, 12);
for (const usage of [true, false]) {
  const more = usage ? { stream_options: { include_usage: true } } : {};
  const stream = await client.chat.completions.create({ model, messages, max_tokens: 12, stream: true, ...more });
  let text = "";
  let used;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    used = chunk.usage ?? used;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(used?.completion_tokens, usage ? 12 : undefined);
}

// Tools
const helper = client.chat.completions.stream({ model, messages, tools: [{ type: "function", function: weather }] });
let deltas = 0;
helper.on("tool_calls.function.arguments.delta", () => (deltas += 1));
const [call] = (await helper.finalMessage()).tool_calls;
assert.equal(call.function.name, "weather");
assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)).sort(), ["city", "days"]);
assert.ok(deltas > 1);
for (const stream of [true, false]) {
  const asked = [];
  const tool = { ...weather, parse: JSON.parse, function: async (given) => asked.push(given) && "Rain." };
  const runner = client.chat.completions.runTools({ model, messages, stream, tools: [{ type: "function", function: tool }] });
  assert.ok(await runner.finalContent());
  assert.equal(asked.length, 1);
  assert.equal(typeof asked[0].days, "number");
  assert.deepEqual(runner.messages.map((message) => message.role), ["user", "assistant", "tool", "assistant"]);
}

// Answers that have a form
const response_format = { type: "json_schema", json_schema: { name: "place", schema: place, strict: true } };
const formed = await client.chat.completions.parse({ model, messages, response_format });
assert.equal(typeof formed.choices[0].message.parsed.days, "number");

// Completions and embeddings
assert.ok((await client.completions.create({ model, prompt: "Once upon", max_tokens: 4 })).choices[0].text);
const input = ["one text", "another"];
const floats = (await client.embeddings.create({ model, input, encoding_format: "float" })).data;
const decoded = (await client.embeddings.create({ model, input })).data; // asks for base64 and decodes it
floats.forEach(({ embedding }, place) =>
  embedding.forEach((value, axis) => assert.ok(Math.abs(value - decoded[place].embedding[axis]) < 1e-6)),
);

// Responses
const first = await client.responses.create({ model, input: "Say something." });
assert.ok(first.output_text);
assert.equal((await client.responses.retrieve(first.id)).output_text, first.output_text);
const following = client.responses.stream({ model, input: "And more?", previous_response_id: first.id });
let said = "";
following.on("response.output_text.delta", (event) => (said += event.delta));
assert.equal((await following.finalResponse()).output_text, said);
const called = await client.responses.create({
  model,
  input: "Which weather?",
  tools: [{ type: "function", strict: true, ...weather }],
});
assert.equal(called.output[0].type, "function_call");

// Audio and models
const silence = Buffer.alloc(44 + 16_000);
silence.write("RIFF");
silence.writeUInt32LE(36 + 16_000, 4);
silence.write("WAVEfmt ", 8);
[16, 0x0001_0001, 16_000, 32_000, 0x0010_0002].forEach((value, place) => silence.writeUInt32LE(value, 16 + 4 * place));
silence.write("data", 36);
silence.writeUInt32LE(16_000, 40);
globalThis.File ??= (await import("node:buffer")).File; // Node.js 18 has it there
const file = await toFile(Readable.from([silence]), "a.wav");
assert.ok((await client.audio.transcriptions.create({ model, file })).text);
const names = [];
for await (const one of client.models.list()) names.push(one.id);
assert.deepEqual(names, [model]);

// Errors
const wrong = new OpenAI({ baseURL: `${url}/v1`, apiKey: "sk-wrong" });
await assert.rejects(wrong.chat.completions.create({ model, messages }), OpenAI.AuthenticationError);
await assert.rejects(client.chat.completions.create({ model: "nobody", messages }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ model, messages, temperature: 9 }), OpenAI.BadRequestError);
