// OpenAI's own JavaScript client, unchanged: asks an endpoint and prints what came, as JSON.
// NODE_PATH=FOLDER/node_modules node openai_client.mjs BASE_URL, after `npm install openai` there.
import { createRequire } from "node:module";

const OpenAI = createRequire(import.meta.url)("openai");
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const chat = {
  model: "toy",
  messages: [{ role: "user", content: "once upon a time" }],
  temperature: 0.9,
  seed: 5,
  max_tokens: 24,
};
const found = {};

found.whole = await client.chat.completions.create(chat);

found.streamed = { text: "", finish: null, usage: null };
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...chat, ...options })) {
  found.streamed.text += chunk.choices[0]?.delta.content ?? "";
  found.streamed.finish = chunk.choices[0]?.finish_reason ?? found.streamed.finish;
  found.streamed.usage = chunk.usage ?? found.streamed.usage;
}

const helper = client.chat.completions.stream(chat);
found.helper = await helper.finalContent();

const plain = { model: "edgespec", prompt: "once upon a time", max_tokens: 24 };
found.completion = await client.completions.create(plain);
const stop = found.completion.choices[0].text.slice(8, 11);
found.stop = stop;
found.stopped = await client.completions.create({ ...plain, stop: [stop] });
found.several = await client.completions.create({ ...plain, temperature: 0.9, seed: 5, n: 3 });
found.scored = await client.chat.completions.create({ ...chat, logprobs: true, top_logprobs: 2 });
found.models = (await client.models.list()).data.map((one) => one.id);

found.errors = {};
const wrong = {
  model: { ...chat, model: "other" },
  value: { ...chat, max_tokens: -1 },
  name: { ...chat, best_of: 4 },
};
for (const [name, asked] of Object.entries(wrong)) {
  try {
    await client.chat.completions.create(asked);
  } catch (error) {
    const { status, param, code } = error;
    found.errors[name] = { kind: error.constructor.name, status, param, code };
  }
}

let chunks = 0;
const long = { ...chat, max_tokens: 3000, stream: true };
const stream = await client.chat.completions.create(long);
for await (const chunk of stream) {
  if (chunk.choices[0]?.delta.content && ++chunks === 3) stream.controller.abort();
}
found.chunks_before_abort = chunks;

console.log(JSON.stringify(found));
