// Vercel's AI SDK with the provider for servers of OpenAI's API.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import * as parts from "./parts.mjs";

const provider = createOpenAICompatible({
  name: "edgespec",
  baseURL: `${parts.URL}/v1`,
  supportsStructuredOutputs: true,
});
const common = { model: provider(parts.MODEL), maxRetries: 0 };
const City = z.object({ city: z.string(), country: z.string() });
const weather = (strict) =>
  tool({
    description: "Return the weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: parts.readWeather,
    ...(strict ? { strict: true } : {}),
  });

async function plain() {
  return (await generateText({ ...common, prompt: parts.ASK.plain })).text;
}

async function stream() {
  return parts.joinPieces(streamText({ ...common, prompt: parts.ASK.plain }).textStream);
}

async function tools(strict = false) {
  const result = streamText({
    ...common,
    prompt: parts.ASK.tools,
    tools: { get_weather: weather(strict) },
    stopWhen: stepCountIs(4),
  });
  return await result.text;
}

async function strict_tools() {
  return tools(true);
}

async function structured() {
  const output = Output.object({ schema: City });
  const done = await generateText({ ...common, prompt: parts.ASK.structured, output });
  return JSON.stringify(done.output);
}

async function tools_and_structured() {
  const done = await generateText({
    ...common,
    prompt: parts.ASK.tools,
    tools: { get_weather: weather(false) },
    output: Output.object({ schema: City }),
    stopWhen: stepCountIs(4),
  });
  return JSON.stringify(done.output);
}

async function thoughts() {
  const done = await generateText({ ...common, prompt: parts.ASK.thoughts });
  return `${done.reasoningText}|${done.text}`;
}

await parts.runParts({
  plain,
  stream,
  tools,
  strict_tools,
  structured,
  tools_and_structured,
  thoughts,
});
