// SPDX-License-Identifier: Apache-2.0
// A spoken conversation in the page: the microphone in, speech out, and both as text, with the events of OpenAI's
// Realtime API. The server finds the turns.
(() => {
  const RATE = 24000; // Hz, in both directions.
  const PIECE = 2400; // Samples sent at a time.
  const PICTURE = "picture"; // The id of its event.
  const RECORDER = `registerProcessor("recorder", class extends AudioWorkletProcessor {
    piece = new Float32Array(${PIECE});
    size = 0;
    process([[samples]]) {
      for (const sample of samples ?? []) {
        this.piece[this.size++] = sample;
        if (this.size === ${PIECE}) {
          this.port.postMessage(this.piece);
          this.size = 0;
        }
      }
      return true;
    }
  });`;

  // 16-bit samples as base64, from and to floats.
  const encode = (floats) => {
    const bytes = new Uint8Array(Int16Array.from(floats, (x) => Math.max(-1, Math.min(1, x)) * 32767).buffer);
    return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
  };
  const decode = (text) => {
    const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
    return Float32Array.from(new Int16Array(bytes.buffer), (x) => x / 32768);
  };

  // Plays pieces of speech one after the other, and knows how much of the last item was heard.
  class Player {
    constructor(context, output, onEnd) {
      this.context = context;
      this.output = output;
      this.onEnd = onEnd;
      this.item = null;
      this.isComplete = true;
      this.end = 0;
      this.pieces = [];
    }

    play(item, samples) {
      if (item !== this.item) [this.item, this.isComplete, this.pieces] = [item, false, []];
      const buffer = this.context.createBuffer(1, samples.length, RATE);
      buffer.copyToChannel(samples, 0);
      const source = this.context.createBufferSource();
      source.buffer = buffer;
      source.connect(this.output);
      const piece = { source, start: Math.max(this.end, this.context.currentTime), duration: buffer.duration };
      source.onended = () => {
        piece.isOver = true; // The clock may say so later.
        this.check();
      };
      source.start(piece.start);
      this.end = piece.start + piece.duration;
      this.pieces.push(piece);
    }

    // No more of the item will come.
    finish() {
      this.isComplete = true;
      this.check();
    }

    check() {
      if (this.isOver()) this.onEnd();
    }

    isOver() {
      return this.isComplete && this.pieces.every((piece) => piece.isOver);
    }

    // The item that is cut and its milliseconds that were heard; null if all of it was.
    stop() {
      if (this.isOver()) return null;
      const now = this.context.currentTime;
      let seconds = 0;
      for (const { source, start, duration } of this.pieces) {
        seconds += Math.max(0, Math.min(duration, now - start));
        source.onended = null;
        source.stop();
      }
      const cut = { item: this.item, ms: Math.floor(1000 * seconds) };
      [this.item, this.isComplete, this.end, this.pieces] = [null, true, 0, []];
      return cut;
    }
  }

  class Call {
    constructor(root) {
      this.state = root.querySelector(".state");
      this.level = root.querySelector(".level span");
      this.delay = root.querySelector(".delay");
      this.delay.textContent = "";
      this.log = root.querySelector(".log");
      this.log.replaceChildren();
      this.lines = new Map();
      this.isClosed = false;
      this.isMuted = false; // What still arrives of an interrupted response is not played.
      this.turnEnd = null; // When the user's last turn ended, until its answer is heard.
      this.show("Connecting");
    }

    // picture: of which the conversation is, as a data URI; or null.
    async open(key, picture) {
      if (!navigator.mediaDevices) throw new Error("browsers give it to pages over HTTPS, and on localhost, only");
      const audio = { channelCount: 1, echoCancellation: true, noiseSuppression: true };
      this.microphone = await navigator.mediaDevices.getUserMedia({ audio });
      this.context = new AudioContext({ sampleRate: RATE });
      await this.context.resume();
      const module = URL.createObjectURL(new Blob([RECORDER], { type: "text/javascript" }));
      await this.context.audioWorklet.addModule(module);
      if (this.isClosed) return this.release();
      this.input = this.context.createAnalyser();
      this.output = this.context.createAnalyser();
      this.output.connect(this.context.destination);
      this.player = new Player(this.context, this.output, () => this.show("Listening"));
      const address = new URL("realtime", document.baseURI);
      address.protocol = address.protocol.replace("http", "ws");
      this.socket = new WebSocket(address, ["realtime", `openai-insecure-api-key.${key}`]);
      this.socket.onmessage = (message) => this.handle(JSON.parse(message.data));
      this.socket.onclose = () => this.close();
      this.socket.onopen = () => {
        if (picture !== null) {
          const item = { type: "message", role: "user", content: [{ type: "input_image", image_url: picture }] };
          this.send("conversation.item.create", { event_id: PICTURE, item });
        }
        this.record();
      };
    }

    record() {
      const recorder = new AudioWorkletNode(this.context, "recorder", { numberOfOutputs: 0 });
      recorder.port.onmessage = ({ data }) => this.send("input_audio_buffer.append", { audio: encode(data) });
      const source = this.context.createMediaStreamSource(this.microphone);
      source.connect(recorder);
      source.connect(this.input);
      this.show("Listening");
      this.showLevel();
    }

    // What is heard now: the model while it speaks, else the user.
    showLevel() {
      const heard = this.state.dataset.state === "Speaking" ? this.output : this.input;
      const samples = new Float32Array(heard.fftSize);
      heard.getFloatTimeDomainData(samples);
      const level = Math.sqrt(Math.max(...samples.map(Math.abs))); // The ear's scale is not linear.
      this.level.style.width = this.isClosed ? 0 : `${100 * Math.min(1, level)}%`;
      if (!this.isClosed) requestAnimationFrame(() => this.showLevel());
    }

    send(type, fields) {
      if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify({ type, ...fields }));
    }

    close() {
      if (this.isClosed) return;
      this.isClosed = true;
      this.release();
      this.show("Ended");
      this.state.dispatchEvent(new Event("ended")); // The page sets its buttons.
    }

    release() {
      this.socket?.close();
      this.microphone?.getTracks().forEach((track) => track.stop());
      if (this.context?.state !== "closed") this.context?.close();
    }

    handle(event) {
      switch (event.type) {
        case "input_audio_buffer.speech_started":
          this.interrupt();
          this.show("Listening");
          break;
        case "input_audio_buffer.speech_stopped":
          this.turnEnd = performance.now();
          this.show("Thinking");
          break;
        case "conversation.item.added":
          if (event.item.role !== "user") break;
          this.write(event.item.id, "user", event.item.content[0].type === "input_image" ? "[picture]" : "[speech]");
          break;
        case "conversation.item.input_audio_transcription.completed":
          this.write(event.item_id, "user", event.transcript);
          break;
        case "response.created":
          this.isMuted = false;
          break;
        case "response.output_text.delta":
        case "response.output_audio_transcript.delta":
          this.write(event.item_id, "assistant", this.text(event.item_id) + event.delta);
          break;
        case "response.output_audio.delta":
          if (this.isMuted) break;
          this.player.play(event.item_id, decode(event.delta));
          this.show("Speaking");
          this.showDelay();
          break;
        case "response.output_audio.done":
          if (!this.isMuted) this.player.finish();
          break;
        case "conversation.item.truncated":
          this.send("conversation.item.retrieve", { item_id: event.item_id });
          break;
        case "conversation.item.retrieved": // What the model remembers of its answer.
          this.write(event.item.id, "assistant", `${event.item.content[0].transcript} —`);
          break;
        case "response.done":
          if (event.response.status === "failed") this.fail(event.response.status_details.error.message);
          if (event.response.status !== "cancelled" && this.player.isOver()) this.show("Listening");
          break;
        case "error":
          this.fail(event.error.message);
          if (event.error.event_id === PICTURE) this.close(); // A conversation without it is not what was asked for.
      }
    }

    // The user speaks: the rest of the answer is neither played nor remembered.
    interrupt() {
      this.isMuted = true;
      const cut = this.player.stop();
      if (cut === null) return;
      this.send("conversation.item.truncate", { item_id: cut.item, content_index: 0, audio_end_ms: cut.ms });
    }

    show(state) {
      this.state.textContent = this.state.dataset.state = state;
    }

    // The time from the end of the user's turn to the first sound of the answer.
    showDelay() {
      if (this.turnEnd === null) return;
      this.delay.textContent = `first sound after ${((performance.now() - this.turnEnd) / 1000).toFixed(2)} s`;
      this.turnEnd = null;
    }

    text(id) {
      return this.lines.get(id)?.textContent ?? "";
    }

    write(id, kind, text) {
      if (!this.lines.has(id)) this.lines.set(id, this.log.appendChild(document.createElement("p")));
      const line = this.lines.get(id);
      line.className = kind;
      line.textContent = text;
      line.scrollIntoView({ block: "nearest" });
    }

    fail(message) {
      this.write(Symbol(), "error", `⚠️ ${message}`);
    }
  }

  // Of Talk and Hang up, for Gradio.
  const buttons = (inCall) => [!inCall, inCall].map((interactive) => ({ interactive, __type__: "update" }));
  let call = null;

  const open = async (made, key, picture) => {
    try {
      await made.open(key, picture);
    } catch (error) {
      if (made.isClosed) return; // Hung up while it connected.
      made.fail(`The microphone cannot be used: ${error.message}`);
      made.close();
    }
  };
  window.realtime = {
    start: (root, { key, picture }) => {
      call = new Call(document.querySelector(root));
      open(call, key, picture);
      return buttons(true);
    },
    stop: () => call?.close(),
    ended: () => buttons(false),
  };
})();
