// SPDX-License-Identifier: Apache-2.0
// Vercel's AI SDK with its provider for OpenAI, unmodified:
// `node ai_sdk.mjs URL KEY MODEL PAINTER_URL PICTURE QUESTION SPOKEN_QUESTION SOUND`; prints the results as JSON.
import { readFile } from "node:fs/promises";

import { createOpenAI } from "@ai-sdk/openai";
import {
  experimental_generateSpeech as generateSpeech, experimental_transcribe as transcribe, generateImage, generateText,
  streamText,
} from "ai";

const [url, key, model, painterUrl, picture, question, spokenQuestion, sound] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: url, apiKey: key });
const painter = createOpenAI({ baseURL: painterUrl, apiKey: key });

const image = { type: "image", image: await readFile(picture) };
const recording = await readFile(sound);

const { text: answer } = await generateText({
  model: openai.chat(model),
  messages: [{ role: "user", content: [image, { type: "text", text: question }] }],
});

const speechPart = { type: "file", data: await readFile(spokenQuestion), mediaType: "audio/wav" };
const streamed = streamText({
  model: openai.chat(model),
  messages: [{ role: "user", content: [image, speechPart] }],
});
const pieces = [];
for await (const piece of streamed.textStream) pieces.push(piece);

const { audio: speech } = await generateSpeech({
  model: openai.speech("tts-1"),
  voice: "alloy",
  text: "A red circle is left of a blue square.",
});

const { text: transcript } = await transcribe({ model: openai.transcription("whisper-1"), audio: recording });
const { text: transcriptOfEnglish } = await transcribe({
  model: openai.transcription("gpt-4o-mini-transcribe"),
  audio: recording,
  providerOptions: { openai: { language: "en" } },
});

const { image: painting } = await generateImage({
  model: painter.image("dall-e-3"),
  prompt: "a red circle is left of a blue square",
});

console.log(JSON.stringify({
  answer, pieces, speech: speech.base64, transcript, transcriptOfEnglish, painting: painting.base64,
}));
