// OpenAI's own package for JavaScript: chat completions and responses.

import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import * as parts from "./parts.mjs";

const client = new OpenAI({ baseURL: `${parts.URL}/v1`, apiKey: "none", maxRetries: 0 });
const model = parts.MODEL;
const City = z.object({ city: z.string(), country: z.string() });
const user = (content) => [{ role: "user", content }];

async function plain() {
  const done = await client.chat.completions.create({ model, messages: user(parts.ASK.plain) });
  return done.choices[0].message.content;
}

async function stream() {
  const chunks = await client.chat.completions.create({
    model,
    messages: user(parts.ASK.plain),
    stream: true,
  });
  async function* pieces() {
    for await (const chunk of chunks) yield chunk.choices[0]?.delta?.content;
  }
  return parts.joinPieces(pieces());
}

async function tools() {
  const runner = client.chat.completions.runTools({
    model,
    messages: user(parts.ASK.tools),
    tools: [
      {
        type: "function",
        function: {
          ...parts.OPENAI_TOOL.function,
          parse: JSON.parse,
          function: parts.readWeather,
        },
      },
    ],
    stream: true,
  });
  return runner.finalContent();
}

async function strict_tools() {
  const done = await client.chat.completions.parse({
    model,
    messages: user(parts.ASK.tools),
    tools: [zodFunction({ name: "get_weather", parameters: z.object({ city: z.string() }) })],
  });
  const [call] = done.choices[0].message.tool_calls;
  return JSON.stringify(call.function.parsed_arguments);
}

async function structured() {
  const done = await client.chat.completions.parse({
    model,
    messages: user(parts.ASK.structured),
    response_format: zodResponseFormat(City, "city"),
  });
  return JSON.stringify(done.choices[0].message.parsed);
}

async function thoughts() {
  const done = await client.chat.completions.create({ model, messages: user(parts.ASK.thoughts) });
  const { reasoning_content, content } = done.choices[0].message;
  return `${reasoning_content}|${content}`;
}

async function responses() {
  const events = client.responses.stream({ model, input: parts.ASK.plain });
  return (await events.finalResponse()).output_text;
}

await parts.runParts({ plain, stream, tools, strict_tools, structured, thoughts, responses });
