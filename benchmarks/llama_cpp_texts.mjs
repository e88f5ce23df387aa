// The arms of llama.cpp in beside_speculation.py, through the npm package node-llama-cpp.
//
// Reads one JSON object on stdin (modules, gguf, draft, lookup, threads, tokens, warmTokens,
// prompts) and prints one with the fields of ``Run`` there.

import fs from "node:fs";
import path from "node:path";
import {pathToFileURL} from "node:url";

const asked = JSON.parse(fs.readFileSync(0, "utf8"));
const entry = path.resolve(asked.modules, "node-llama-cpp/dist/index.js");
const {
    getLlama, LlamaLogLevel, DraftSequenceTokenPredictor, InputLookupTokenPredictor,
} = await import(pathToFileURL(entry));

const llama = await getLlama({
    gpu: false, build: "never", maxThreads: asked.threads, logLevel: LlamaLogLevel.error,
});
const longest = Math.max(...asked.prompts.map((one) => one.length));
const contextSize = longest + asked.tokens + 64;
const load = async (file) => {
    const model = await llama.loadModel({modelPath: path.resolve(file), gpuLayers: 0});
    return model.createContext({sequences: 1, threads: asked.threads, batchSize: 512, contextSize});
};
const context = await load(asked.gguf);
const draftContext = asked.draft ? await load(asked.draft) : undefined;
const draftSequence = draftContext?.getSequence();

const makePredictor = (prompt) => {
    if (draftSequence !== undefined) return new DraftSequenceTokenPredictor(draftSequence);
    if (!asked.lookup) return undefined;
    const predictor = new InputLookupTokenPredictor();
    predictor.updateInputTokens(prompt);
    return predictor;
};

const run = {texts: [], first_ms: [], rest_ms: [], target_mib: 0};
for (const [number, prompt] of [asked.prompts[0], ...asked.prompts].entries()) {
    const tokenPredictor = makePredictor(prompt);
    const sequence = context.getSequence({tokenPredictor});
    const count = number ? asked.tokens : asked.warmTokens;
    const tokens = [], times = [];
    const began = performance.now();
    for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        times.push(performance.now());
        tokens.push(token);
        if (tokens.length >= count || context.model.isEogToken(token)) break;
    }
    if (number) {
        run.texts.push(tokens);
        run.first_ms.push(times[0] - began);
        run.rest_ms.push(times.at(-1) - times[0]);
    }
    sequence.dispose();
}
run.target_mib = process.resourceUsage().maxRSS / 1024;
console.log(JSON.stringify(run));
process.exit(0);
