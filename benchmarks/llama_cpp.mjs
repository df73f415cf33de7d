// SPDX-License-Identifier: Apache-2.0
// A language model on llama.cpp, through node-llama-cpp: requests are lines of JSON on stdin, pieces of text on stdout.
//
//     node llama_cpp.mjs MODULE MODEL.gguf THREADS SEQUENCES CONTEXT
//
// A request is {id, prompt, maxTokens, penalty}; each token of its answer is a line {id, text}, its end {id, isEnd: true}.
// All requests that are there at once share the batch. The first line says what was loaded.

import readline from "node:readline";

const [module, modelPath, threads, sequences, contextSize] = process.argv.slice(2);
const {getLlama} = await import(module);
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: Number(threads)});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({
    contextSize: Number(contextSize), sequences: Number(sequences), threads: Number(threads)
});
const write = (message) => process.stdout.write(JSON.stringify(message) + "\n");

async function answer({id, prompt, maxTokens, penalty}) {
    if (!maxTokens) return write({id, isEnd: true});
    const sequence = context.getSequence();
    const tokens = model.tokenize(prompt, true);
    const seen = [...tokens];
    const repeatPenalty = {punishTokens: () => seen, penalty};
    let count = 0;
    try {
        for await (const token of sequence.evaluate(tokens, {temperature: 0, repeatPenalty})) {
            seen.push(token);
            write({id, text: model.detokenize([token])});
            if (++count === maxTokens) break;
        }
    } finally {
        await sequence.dispose();
    }
    write({id, isEnd: true});
}

write({loaded: modelPath, threads: context.currentThreads});
for await (const line of readline.createInterface({input: process.stdin}))
    answer(JSON.parse(line)).catch((error) => write({error: String(error)}));
process.exit(0);
