// SPDX-License-Identifier: Apache-2.0
// OpenAI's client for JavaScript, unmodified:
// `node openai_node.mjs URL KEY MODEL PAINTER_URL PICTURE QUESTION SOUND`; prints the results as JSON.
import { createReadStream } from "node:fs";
import { readFile } from "node:fs/promises";

import OpenAI from "openai";

const [url, key, model, painterUrl, picture, question, sound] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: key });
const painter = new OpenAI({ baseURL: painterUrl, apiKey: key });

const image = { url: `data:image/png;base64,${await readFile(picture, "base64")}` };
const content = [{ type: "image_url", image_url: image }, { type: "text", text: question }];
const chat = { model, messages: [{ role: "user", content }] };

const answer = await client.chat.completions.create({
  ...chat,
  modalities: ["text", "audio"],
  audio: { voice: "alloy", format: "wav" },
});
const pieces = [];
for await (const chunk of await client.chat.completions.create({ ...chat, stream: true })) {
  pieces.push(chunk.choices[0].delta.content ?? "");
}

const asked = {
  model,
  input: [{
    role: "user",
    content: [{ type: "input_image", image_url: image.url }, { type: "input_text", text: question }],
  }],
};
const response = await client.responses.create(asked);
const deltas = [];
for await (const event of client.responses.stream(asked)) {
  if (event.type === "response.output_text.delta") deltas.push(event.delta);
}

const speech = await client.audio.speech.create({
  model: "gpt-4o-mini-tts",
  voice: "coral",
  input: "A red circle is left of a blue square.",
});
const transcript = await client.audio.transcriptions.create({ model: "whisper-1", file: createReadStream(sound) });
const painting = await painter.images.generate({
  model: "gpt-image-1",
  prompt: "a red circle is left of a blue square",
});

console.log(JSON.stringify({
  answer: answer.choices[0].message.content,
  spokenAnswer: answer.choices[0].message.audio.data,
  pieces,
  response: response.output_text,
  deltas,
  speech: Buffer.from(await speech.arrayBuffer()).toString("base64"),
  transcript: transcript.text,
  painting: painting.data[0].b64_json,
}));
