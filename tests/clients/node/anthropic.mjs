// Anthropic's Node SDK, unchanged: node anthropic.mjs URL KEY MODEL
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const [baseURL, apiKey, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey });
const messages = [{ role: "user", content: "Say something about caches." }];
const input_schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ name: "weather", description: "The weather to come.", input_schema }];

const whole = await client.messages.create({ model, messages, max_tokens: 12 });
assert.ok(whole.content[0].text);
const stream = client.messages.stream({ model, messages, max_tokens: 12 });
let text = "";
stream.on("text", (piece) => (text += piece));
assert.equal((await stream.finalMessage()).usage.output_tokens, 12);
assert.equal(text, whole.content[0].text);

const called = await client.messages.stream({ model, messages, max_tokens: 500, tools }).finalMessage();
assert.equal(called.stop_reason, "tool_use");
const [call] = called.content;
assert.equal(typeof call.input.city, "string");
const result = { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "Rain." }] };
const told = [...messages, { role: "assistant", content: called.content }, result];
const answer = await client.messages.create({ model, messages: told, max_tokens: 500, tools });
assert.equal(answer.content[0].type, "text");

assert.ok((await client.messages.countTokens({ model, messages })).input_tokens > 0);
const wrong = new Anthropic({ baseURL, apiKey: "sk-wrong" });
await assert.rejects(wrong.messages.create({ model, messages, max_tokens: 1 }), Anthropic.AuthenticationError);
await assert.rejects(client.messages.create({ model: "nobody", messages, max_tokens: 1 }), Anthropic.NotFoundError);
await assert.rejects(client.messages.create({ model: "", messages, max_tokens: 1 }), Anthropic.BadRequestError);
