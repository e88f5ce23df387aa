// Ollama's own package for JavaScript.

import { Ollama } from "ollama";
import * as parts from "./parts.mjs";

const client = new Ollama({ host: parts.URL });
const model = parts.MODEL;
const user = (content) => [{ role: "user", content }];

async function plain() {
  await client.list();
  await client.show({ model });
  return (await client.chat({ model, messages: user(parts.ASK.plain) })).message.content;
}

async function generate() {
  return (await client.generate({ model, prompt: parts.ASK.plain })).response;
}

async function stream() {
  const chunks = await client.chat({ model, messages: user(parts.ASK.plain), stream: true });
  async function* pieces() {
    for await (const chunk of chunks) yield chunk.message.content;
  }
  return parts.joinPieces(pieces());
}

async function tools() {
  const messages = user(parts.ASK.tools);
  for (;;) {
    const { message } = await client.chat({ model, messages, tools: [parts.OPENAI_TOOL] });
    if (!message.tool_calls?.length) return message.content;
    messages.push(message);
    for (const call of message.tool_calls) {
      const content = parts.readWeather(call.function.arguments);
      messages.push({ role: "tool", tool_name: call.function.name, content });
    }
  }
}

async function structured() {
  const messages = user(parts.ASK.structured);
  return (await client.chat({ model, messages, format: parts.CITY_SCHEMA })).message.content;
}

async function thoughts() {
  const { message } = await client.chat({ model, messages: user(parts.ASK.thoughts), think: true });
  return `${message.thinking}|${message.content}`;
}

await parts.runParts({ plain, generate, stream, tools, structured, thoughts });
