// JavaScript clients: the AI SDK with three providers, openai, and Anthropic's SDK.
// Usage: node js_clients.mjs URL, in a directory with the packages. Cases and output: as python_clients.py.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const url = process.argv[2];
const require = createRequire(`${process.cwd()}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const question = "What is 17 + 25?", story = "Tell a long story about a river.";
const system = "Your name is Otto.", nameQuestion = "What is your name?";
const user = [{ role: "user", content: question }], asked = [{ role: "user", content: nameQuestion }];
const turns = [
  { role: "user", content: "My name is Ada." },
  { role: "assistant", content: "Hello Ada!" },
  { role: "user", content: "What is my name?" },
];
const city = { enum: ["Paris", "London"] };
const schema = { type: "object", properties: { city }, required: ["city"], additionalProperties: false };

async function cancelled() {
  const text = await (await fetch(`${url}/metrics`)).text();
  return text.match(/^tridecode:requests_total\{[^}]*"cancelled"[^}]*\} (\S+)$/m)?.[1];
}

async function run(client, name, cases) {
  const { version } = require(`${process.cwd()}/node_modules/${name}/package.json`);
  for (const [key, ask] of Object.entries(cases)) {
    const before = await cancelled();
    let got = await ask().catch((error) => `${error.name}: ${error.message}`);
    for (let i = 0; key === "cancel" && got === undefined && i < 100; i++) {
      await new Promise((done) => setTimeout(done, 50));
      if ((await cancelled()) !== before) got = "cancelled";
    }
    console.log(JSON.stringify([client, version, key, typeof got === "string" ? got : JSON.stringify(got) ?? ""]));
  }
}

async function joined(stream, text, stop) {
  let all = "";
  for await (const part of stream) {
    all += text(part) ?? "";
    if (stop && all) return stop();
  }
  return all;
}

const { generateText, streamText, Output, tool, jsonSchema } = await load("ai");
async function aiSdk(client, name, model) {
  const options = { maxRetries: 0, temperature: 0, maxOutputTokens: 400, onError() {} };
  const ask = (more, id = "bundled") => generateText({ ...options, model: model(id), prompt: question, ...more });
  const stream = (more) => streamText({ ...options, model: model("bundled"), prompt: question, ...more }).textStream;
  const weather = tool({ description: "Weather of a city.", inputSchema: jsonSchema(schema) });
  await run(client, name, {
    plain: async () => (await ask({})).text,
    stream: () => joined(stream({}), (part) => part),
    system: async () => (await ask({ system, prompt: nameQuestion })).text,
    turns: async () => (await ask({ prompt: undefined, messages: turns })).text,
    call: async () => (await ask({ tools: { weather }, toolChoice: "required" })).toolCalls[0].input,
    schema: async () => (await ask({ output: Output.object({ schema: jsonSchema(schema) }) })).output,
    error: () => ask({}, "other"),
    cancel: () => {
      const control = new AbortController();
      return joined(stream({ prompt: story, abortSignal: control.signal }), (part) => part, () => control.abort());
    },
  });
}

const v1 = { baseURL: `${url}/v1`, apiKey: "none" };
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const compatible = createOpenAICompatible({ ...v1, name: "local", supportsStructuredOutputs: true });
await aiSdk("ai, openai-compatible", "@ai-sdk/openai-compatible", compatible);
const provider = (await load("@ai-sdk/openai")).createOpenAI(v1);
await aiSdk("ai, openai chat", "@ai-sdk/openai", provider.chat);
await aiSdk("ai, openai responses", "@ai-sdk/openai", provider.responses);
await aiSdk("ai, anthropic", "@ai-sdk/anthropic", (await load("@ai-sdk/anthropic")).createAnthropic(v1));

const OpenAI = (await load("openai")).default;
const chats = new OpenAI({ ...v1, maxRetries: 0 }).chat.completions;
const chat = (more) => chats.create({ model: "bundled", temperature: 0, messages: user, ...more });
const message = async (more) => (await chat(more)).choices[0].message;
const delta = (part) => part.choices[0]?.delta.content;
const tools = [{ type: "function", function: { name: "get_weather", parameters: schema } }];
const form = { type: "json_schema", json_schema: { name: "city", schema, strict: true } };
await run("openai (npm)", "openai", {
  plain: async () => (await message({})).content,
  stream: async () => joined(await chat({ stream: true }), delta),
  system: async () => (await message({ messages: [{ role: "system", content: system }, ...asked] })).content,
  turns: async () => (await message({ messages: turns })).content,
  call: async () => (await message({ tools, tool_choice: "required" })).tool_calls[0].function.arguments,
  schema: async () => (await message({ response_format: form })).content,
  error: () => chat({ model: "other" }),
  cancel: async () => {
    const stream = await chat({ stream: true, messages: [{ role: "user", content: story }] });
    return joined(stream, delta, () => stream.controller.abort());
  },
});

const Anthropic = (await load("@anthropic-ai/sdk")).default;
const messages = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 }).messages;
const body = { model: "bundled", max_tokens: 400, messages: user };
const answer = async (more) => (await messages.create({ ...body, ...more })).content[0];
const called = { tools: [{ name: "get_weather", input_schema: schema }], tool_choice: { type: "any" } };
await run("anthropic (npm)", "@anthropic-ai/sdk", {
  plain: async () => (await answer({})).text,
  stream: () => messages.stream(body).finalText(),
  system: async () => (await answer({ system, messages: asked })).text,
  turns: async () => (await answer({ messages: turns })).text,
  call: async () => (await answer(called)).input,
  schema: async () => (await answer({ output_config: { format: { type: "json_schema", schema } } })).text,
  error: () => answer({ model: "other" }),
  cancel: async () => {
    const stream = await messages.create({ ...body, stream: true, messages: [{ role: "user", content: story }] });
    return joined(stream, (part) => part.delta?.text, () => stream.controller.abort());
  },
});
