// Anthropic's own package for JavaScript.

import Anthropic from "@anthropic-ai/sdk";
import * as parts from "./parts.mjs";

const client = new Anthropic({ baseURL: parts.URL, apiKey: "none", maxRetries: 0 });
const common = { model: parts.MODEL, max_tokens: 512 };
const user = (content) => [{ role: "user", content }];
const textOf = (message) =>
  message.content.filter((block) => block.type === "text").map((block) => block.text).join("");
const TOOL = {
  name: "get_weather",
  description: "Return the weather of a city.",
  input_schema: parts.WEATHER_SCHEMA,
};

async function plain() {
  return textOf(await client.messages.create({ ...common, messages: user(parts.ASK.plain) }));
}

async function stream() {
  const events = client.messages.stream({ ...common, messages: user(parts.ASK.plain) });
  async function* pieces() {
    for await (const event of events) if (event.delta?.text) yield event.delta.text;
  }
  return parts.joinPieces(pieces());
}

async function tools() {
  const messages = user(parts.ASK.tools);
  for (;;) {
    const message = await client.messages
      .stream({ ...common, messages, tools: [TOOL] })
      .finalMessage();
    if (message.stop_reason !== "tool_use") return textOf(message);
    messages.push({ role: "assistant", content: message.content });
    const calls = message.content.filter((block) => block.type === "tool_use");
    const content = calls.map((call) => ({
      type: "tool_result",
      tool_use_id: call.id,
      content: parts.readWeather(call.input),
    }));
    messages.push({ role: "user", content });
  }
}

async function structured() {
  const format = { type: "json_schema", schema: parts.CITY_SCHEMA };
  const messages = user(parts.ASK.structured);
  return textOf(await client.messages.create({ ...common, messages, output_config: { format } }));
}

async function thoughts() {
  const message = await client.messages.create({
    ...common,
    max_tokens: 2048,
    messages: user(parts.ASK.thoughts),
    thinking: { type: "enabled", budget_tokens: 1024 },
  });
  const thought = message.content.find((block) => block.type === "thinking")?.thinking;
  return `${thought}|${textOf(message)}`;
}

await parts.runParts({ plain, stream, tools, structured, thoughts });
