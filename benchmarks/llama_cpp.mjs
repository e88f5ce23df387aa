// The arm of llama.cpp in beside_others.py, through the npm package node-llama-cpp.
//
//     node llama_cpp.mjs NODE_MODULES GGUF THREADS SESSIONS PROMPT_TOKENS STEPS WARM_STEPS
//
// Prints one JSON object with the figures that beside_others.py describes.

import path from "node:path";
import {pathToFileURL} from "node:url";

const [modules, gguf, ...counts] = process.argv.slice(2);
const [threads, sessions, promptTokens, steps, warmSteps] = counts.map(Number);
const entry = path.resolve(modules, "node-llama-cpp/dist/index.js");
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(entry));

const llama = await getLlama({
    gpu: false, build: "never", maxThreads: threads, logLevel: LlamaLogLevel.error,
});
const model = await llama.loadModel({modelPath: path.resolve(gguf), gpuLayers: 0});
const context = await model.createContext({
    sequences: sessions, threads, batchSize: 512,
    contextSize: promptTokens + steps + 64,
});
const sequences = Array.from({length: sessions}, () => context.getSequence());
const streams = sequences.map((sequence, session) => sequence.evaluate(
    Array.from({length: promptTokens}, (_, i) => (7919 * (i + 31 * session)) % 40_000 + 100),
    {temperature: 0, yieldEogToken: true},
));

const median = (values) => values.toSorted((a, b) => a - b)[values.length >> 1];
const wall = [], cpu = [];
let began = process.hrtime.bigint(), used = process.cpuUsage();
for (let step = 0; step <= steps; step += 1) {
    await Promise.all(streams.map((stream) => stream.next()));
    const now = process.hrtime.bigint(), all = process.cpuUsage();
    wall.push(Number(now - began) / 1e6);
    cpu.push((all.user + all.system - used.user - used.system) / 1e3);
    began = now;
    used = all;
}
const figures = {"first token": wall[0]};
if (steps > 0) {
    figures["a token"] = median(wall.slice(1 + warmSteps)) / sessions;
    figures.CPU = median(cpu.slice(1 + warmSteps)) / sessions;
}
console.log(JSON.stringify(figures));
process.exit(0);
