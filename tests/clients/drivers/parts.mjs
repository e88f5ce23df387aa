// Parts of a driver in JavaScript, as in parts.py: each part writes one line of JSON.

export const URL = process.env.EDGESPEC_CLIENT_URL;
export const MODEL = process.env.EDGESPEC_CLIENT_MODEL;
export const ASK = JSON.parse(process.env.EDGESPEC_CLIENT_ASK);
export const CITY_SCHEMA = {
  type: "object",
  properties: { city: { type: "string" }, country: { type: "string" } },
  required: ["city", "country"],
  additionalProperties: false,
};
export const WEATHER_SCHEMA = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
export const OPENAI_TOOL = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Return the weather of a city.",
    parameters: WEATHER_SCHEMA,
  },
};

// Return the weather that a call with these arguments finds.
export function readWeather(given) {
  const { city } = typeof given === "string" ? JSON.parse(given) : given;
  return `21 degrees in ${city}`;
}

// Return the text of a stream. Throws an error if it came in one piece.
export async function joinPieces(pieces) {
  const filled = [];
  for await (const piece of pieces) if (piece) filled.push(piece);
  if (filled.length < 2) throw new Error(`the stream has ${filled.length} pieces`);
  return filled.join("");
}

// Run the parts that are asked for, and write a line for each.
export async function runParts(parts) {
  const wanted = (process.env.EDGESPEC_CLIENT_PARTS ?? "").split(" ").filter(Boolean);
  for (const part of wanted.length ? wanted : Object.keys(parts)) {
    let line;
    try {
      line = { part, shows: String(await parts[part]()) };
    } catch (error) {
      line = { part, error: String(error) };
    }
    process.stdout.write(`\n${JSON.stringify(line)}\n`);
  }
}
