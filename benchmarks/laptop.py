# SPDX-License-Identifier: Apache-2.0
"""`talk` beside llama.cpp, on a machine without a GPU: the same weights, questions and voice, in turns.

    python benchmarks/laptop.py [--rounds N] [--llama-cpp FOLDER] [--recordings FOLDER] [--output FILE.json] [--quick]
    python benchmarks/laptop.py --int8 [--rounds N] [--output FILE.json] [--quick]

The opponent is llama.cpp with the weights in 8 bits (Q8_0), on all cores, and the synthesizer of `talk` in a process
beside it, which speaks each sentence when it is written. node-llama-cpp of npm has llama.cpp as a library; it is
installed into a folder of the user's cache at the first run (`--llama-cpp`: another one), and the file of the weights
is written there. Needs Node 20 or newer. Both write greedily, with the repetition penalty of `talk`. Both are started
one after the other, and neither computes while the other one is measured.

`--recordings`: of people, in the format of Debian's package pocketsphinx-testdata; how many of their words `talk` hears
wrong.

`--int8`: instead, `talk` with its language model in int8 beside the 16 bits of its checkpoint. Both write their answers
greedily: how many are equal, and how many of the tokens before the first other one. The voice of `talk` speaks them,
and its recognizer hears them: the share of the words of an answer that it understands. The perplexity is of this
documentation, in parts of 1,024 tokens. Then both answer 1 and 8 callers, in turns. Needs a processor that multiplies
int8 (VNNI, AMX).
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiohttp
import gguf
import numpy as np
import openai
from int8_weights import add_int8
from process_memory import pss_of
from report import Cell, Report, make_parser, parse, percentile, progress
from safetensors.numpy import load_file
from servers import omni_server, run_server
from transformers import AutoTokenizer
from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS, RequestFuncInput
from voice import MAX_TOKENS, QUESTIONS

from vllm_omni.entrypoints.cli.bench_requests import request_chat
from vllm_omni.stage.sentences import SentenceCutter
from vllm_omni_talk.weights import language_model

NODE_LLAMA_CPP = "node-llama-cpp@3.22"
CALLERS = (1, 8)
CONTEXT = 2048
PENALTY = 1.1
RECORDINGS = Path("/usr/share/pocketsphinx/test/data/librivox")
_VOICE = """
import json, os, sys
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
from hibari import Hibari
voice = Hibari("heart")
voice("Hello.")
print("ready", flush=True)
for line in sys.stdin:
    print(len(voice(json.loads(line))), flush=True)
"""


@dataclass(frozen=True)
class Answer:
    """
    Attributes:
        tokens: That were written.
        first_sound: In seconds since the request; None if it was not spoken.
    """

    tokens: int
    first_sound: float | None


class Backend(ABC):
    """A language model with a voice.

    Attributes:
        ready_s: From the start of its processes to the first request that it can take.
        pids: Of its processes, which may have children.
    """

    ready_s: float
    pids: Sequence[int]

    @abstractmethod
    async def ask(self, question: str, *, spoken: bool) -> Answer: ...

    def memory(self) -> float:
        """The PSS of all processes, in GB."""
        return sum(map(pss_of, self.pids))


class Talk(Backend):
    """The server, and clients that stream."""

    def __init__(self, url: str, pid: int, ready_s: float) -> None:
        self._url, self.pids, self.ready_s = url, (pid,), ready_s

    async def ask(self, question: str, *, spoken: bool) -> Answer:
        request = RequestFuncInput(
            prompt=question,
            api_url=f"{self._url}/v1/chat/completions",
            prompt_len=0,
            output_len=MAX_TOKENS,
            model="talk",
            extra_body={"modalities": ["text", "audio"] if spoken else ["text"], "repetition_penalty": PENALTY},
        )
        async with aiohttp.ClientSession() as session:
            ask = request_chat if spoken else ASYNC_REQUEST_FUNCS["openai-chat"]
            output: Any = await ask(request, session)
        if not output.success:
            raise RuntimeError(output.error)
        return Answer(output.output_tokens, output.ttfa if spoken else None)

    def hear(self, path: Path) -> str:
        client = openai.OpenAI(base_url=f"{self._url}/v1", api_key="none")
        with path.open("rb") as file:
            return client.audio.transcriptions.create(model="talk", file=file).text


class LlamaCpp(Backend):
    """llama.cpp in one process and the voice in another, over their standard streams."""

    def __init__(self, module: Path, weights: Path, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        started = time.monotonic()
        threads = str(len(os.sched_getaffinity(0)))
        script = Path(__file__).with_name("llama_cpp.mjs")
        arguments = [module.as_posix(), str(weights), threads, str(max(CALLERS)), str(CONTEXT)]
        self._node = _start(["node", str(script), *arguments])
        self._voice = _start([sys.executable, "-c", _VOICE])
        self.pids = (self._node.pid, self._voice.pid)
        for process in (self._node, self._voice):
            if not _line(process):
                raise RuntimeError(f"{process.args!r} ended with {process.wait()}")
        self.ready_s = time.monotonic() - started

    async def ask(self, question: str, *, spoken: bool) -> Answer:
        loop, started = asyncio.get_running_loop(), time.monotonic()
        cutter, tokens, first_sound = SentenceCutter(first_is_clause=True), 0, None
        async for text in self._write(question):
            tokens += text is not None
            for sentence in cutter.add(text or "", is_last=text is None) if spoken else ():
                if await loop.run_in_executor(None, self._speak, sentence) and first_sound is None:
                    first_sound = time.monotonic() - started
        return Answer(tokens, first_sound)

    async def _write(self, question: str) -> AsyncIterator[str | None]:
        """The texts of the tokens, and None."""
        messages = [{"role": "user", "content": question}]
        prompt = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        number = max(self._requests, default=-1) + 1
        pieces = self._requests[number] = asyncio.Queue()
        request = {"id": number, "prompt": prompt, "maxTokens": MAX_TOKENS, "penalty": PENALTY}
        _send(self._node, request)
        while not (piece := await pieces.get()).get("isEnd"):
            yield piece["text"]
        yield None

    def _speak(self, text: str) -> int:
        _send(self._voice, text)
        return int(_line(self._voice))

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Delivers what llama.cpp writes."""
        task = asyncio.create_task(self._read(asyncio.get_running_loop()))
        try:
            yield
        finally:
            _send(self._node, {"id": -1, "prompt": "", "maxTokens": 0, "penalty": 1})  # Its end ends the reader.
            await task

    async def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while (message := json.loads(await loop.run_in_executor(None, _line, self._node)))["id"] >= 0:
            self._requests[message["id"]].put_nowait(message)
            if message.get("isEnd"):
                del self._requests[message["id"]]

    def close(self) -> None:
        for process in (self._node, self._voice):
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def _start(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


def _send(process: "subprocess.Popen[str]", message: Any) -> None:
    stream: IO[str] | None = process.stdin
    assert stream is not None
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def install_llama_cpp(folder: Path) -> Path:
    """The path of node-llama-cpp's module, which is installed with its library if it is not there."""
    module = folder / "node_modules" / "node-llama-cpp" / "dist" / "index.js"
    if not module.is_file():
        progress(f"installing {NODE_LLAMA_CPP} into {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", NODE_LLAMA_CPP]
        subprocess.run(command, cwd=folder, check=True)
    return module


def write_gguf(checkpoint: Path, path: Path) -> None:
    """Writes a Llama model of `talk`'s in the format of llama.cpp: matrices in Q8_0, all else in float32."""
    config = json.loads((checkpoint / "config.json").read_text())
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    _add_tokenizer(writer, tokenizer, config)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        values = tensor.astype(np.float32)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _permuted(values, heads if "q_proj" in name else kv_heads)
        if values.ndim == 1:
            writer.add_tensor(_gguf_name(name), values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(_gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    words = {number: word for word, number in tokenizer["model"]["vocab"].items()}
    special = {token["id"] for token in tokenizer["added_tokens"]}
    numbers = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([words[number] for number in numbers])
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if number in special else kinds.NORMAL for number in numbers])
    pairs = tokenizer["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in pairs])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rotary embeddings turn neighbours there, and halves of a head in transformers."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
        return f"blk.{match[1]}.{_GGUF_NAMES[match[2]]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


@dataclass
class Figures:
    """Of one backend; each list has a value of each round.

    Attributes:
        rates: Tokens/s, by the number of callers.
        first_sounds: Medians over the questions, in seconds, of one listener.
    """

    rates: dict[int, list[float]]
    first_sounds: list[float]
    memory_ready: float
    memory_after: float = 0.0


async def measure_round(backend: Backend, questions: Sequence[str], figures: Figures) -> None:
    for callers in CALLERS:
        waiting = iter([*questions] * min(callers, 2))

        async def call(waiting: Iterator[str] = waiting) -> int:
            return sum([(await backend.ask(question, spoken=False)).tokens for question in waiting])

        started = time.monotonic()
        tokens = sum(await asyncio.gather(*(call() for _ in range(callers))))
        figures.rates[callers].append(tokens / (time.monotonic() - started))
    answers = [await backend.ask(question, spoken=True) for question in questions]
    figures.first_sounds.append(percentile([a.first_sound for a in answers if a.first_sound is not None], 50))


async def compare(talk: Talk, other: LlamaCpp, questions: Sequence[str], rounds: int) -> tuple[Figures, Figures]:
    backends: tuple[Backend, Backend] = (talk, other)
    async with other.reading():
        for backend in backends:
            await backend.ask(questions[0], spoken=True)
        found = [Figures({callers: [] for callers in CALLERS}, [], backend.memory()) for backend in backends]
        for number in range(rounds):
            for backend, figures in zip(backends, found, strict=True):
                progress(f"round {number + 1}: {type(backend).__name__}")
                await measure_round(backend, questions, figures)
                rates = ", ".join(f"{figures.rates[callers][-1]:.1f} with {callers} callers" for callers in CALLERS)
                progress(f"tokens/s: {rates}; first sound after {figures.first_sounds[-1]:.2f} s")
        for backend, figures in zip(backends, found, strict=True):
            figures.memory_after = backend.memory()
    return found[0], found[1]


def words_wrong(hear: Callable[[Path], str], recordings: Path) -> float:
    """The edit distance of what is heard to the texts, over the number of their words."""
    sentences = re.findall(r"<s> (.*?) </s> \((\S+)\)", (recordings / "transcription").read_text())
    expected = _words(" ".join(text for text, _ in sentences))
    heard = [word for _, name in sentences for word in _words(hear(recordings / f"{name}.wav"))]
    distances = list(range(len(heard) + 1))
    for row, word in enumerate(expected, 1):
        diagonal, distances[0] = distances[0], row
        for column, other in enumerate(heard, 1):
            cheapest = min(distances[column] + 1, distances[column - 1] + 1, diagonal + (word != other))
            diagonal, distances[column] = distances[column], cheapest
    return distances[-1] / len(expected)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower().replace("-", " ").replace("mr.", "mister"))


def add_figures(report: Report, talk: Talk, other: LlamaCpp, ours: Figures, theirs: Figures) -> None:
    def add(what: str, mine: Sequence[float], its: Sequence[float], unit: str) -> None:
        ratios = [a / b for a, b in zip(mine, its, strict=True)]
        ratio = percentile(ratios, 50)
        row: dict[str, Cell] = {
            "what": what,
            "talk": percentile(mine, 50),
            "llama.cpp": percentile(its, 50),
            "unit": unit,
        }
        report.rows.append({**row, "ratio": ratio, "least": min(ratios), "most": max(ratios)})
        report.ratios[what.replace(" ", "_").replace(",", "")] = ratio

    for callers in CALLERS:
        add(f"callers {callers}", ours.rates[callers], theirs.rates[callers], "tokens/s")
    add("first sound", ours.first_sounds, theirs.first_sounds, "s")
    add("memory, ready", [ours.memory_ready], [theirs.memory_ready], "GB")
    add("memory, after all rounds", [ours.memory_after], [theirs.memory_after], "GB")
    add("start", [talk.ready_s], [other.ready_s], "s")
    report.notes.append("ratio: of talk to llama.cpp in each round: the median, the least and the most")
    report.notes.append("callers N: higher is better; all others: lower. Memory: PSS of all processes")


@contextlib.contextmanager
def open_talk(folder: Path) -> Iterator[Talk]:
    started = time.monotonic()
    with run_server(omni_server(Path("talk")), folder) as server:
        yield Talk(server.url, server.pid, time.monotonic() - started)


def add_llama_cpp(report: Report, rounds: int, questions: Sequence[str], llama_cpp: Path, recordings: Path) -> None:
    """Compares `talk` with llama.cpp, and adds a row for each figure, and a note of the words that it hears wrong."""
    module = install_llama_cpp(llama_cpp)
    checkpoint = language_model(with_weights=True)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        weights = Path(folder) / "talk-Q8_0.gguf"
        write_gguf(checkpoint, weights)
        progress("starting talk")
        talk = stack.enter_context(open_talk(Path(folder)))
        progress("starting llama.cpp")
        other = LlamaCpp(module, weights, tokenizer)
        stack.callback(other.close)
        add_figures(report, talk, other, *asyncio.run(compare(talk, other, questions, rounds)))
        if recordings.is_dir():
            wrong = words_wrong(talk.hear, recordings)
            report.notes.append(f"talk hears {wrong:.1%} of the words of people wrong, in {recordings.name}")


def main() -> None:
    parser = make_parser(__doc__)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm_omni" / "benchmarks"
    parser.add_argument("--rounds", type=int, metavar="N", help="default: 5; quick: 2")
    parser.add_argument("--llama-cpp", type=Path, default=cache, metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--recordings", type=Path, default=RECORDINGS, metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--int8", action="store_true", help="compare talk in int8 with its 16 bits")
    args: argparse.Namespace = parse(parser)
    rounds, questions = args.rounds or (2 if args.quick else 5), QUESTIONS[: 4 if args.quick else 8]
    report = Report("laptop", {"quick": str(args.quick), "rounds": rounds, "load": f"{os.getloadavg()[0]:.1f}"})
    if args.int8:
        add_int8(report, rounds, is_quick=args.quick)
    else:
        add_llama_cpp(report, rounds, questions, args.llama_cpp, args.recordings)
    report.notes.append(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    report.finish(args.output)


if __name__ == "__main__":
    main()
