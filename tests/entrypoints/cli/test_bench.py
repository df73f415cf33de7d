# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve --omni`: its arguments, its request functions, its arithmetic, and runs against real servers."""

import asyncio
import base64
import importlib
import inspect
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.benchmarks import serve as vllm_serve
from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS, RequestFuncInput

from tests.servers import RunningServer
from vllm_omni.config.utils import find_checkpoint
from vllm_omni.entrypoints.cli import bench, bench_requests
from vllm_omni.entrypoints.cli.bench_requests import BACKENDS, OmniRequestFuncOutput, PcmCounter
from vllm_omni.entrypoints.openai.audio_formats import wav_header

GROUP = "server"


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """vLLM's dictionary of backends, without ours, as before a benchmark."""
    for name in BACKENDS:
        monkeypatch.delitem(ASYNC_REQUEST_FUNCS, name, raising=False)
    yield ASYNC_REQUEST_FUNCS
    for name in BACKENDS:
        ASYNC_REQUEST_FUNCS.pop(name, None)


class TestArguments:
    def parse(self, *arguments: str) -> Any:
        bench.register_backends()
        return bench.parse(arguments)

    def test_backends_are_registered_by_the_command_and_not_by_an_import(self, registry: dict[str, Any]) -> None:
        importlib.reload(bench)
        assert not set(BACKENDS) & set(registry)
        bench.register_backends()
        bench.register_backends()
        assert set(BACKENDS) < set(registry)
        assert vllm_serve.OPENAI_COMPATIBLE_BACKENDS.count("openai-chat-omni") == 1

    def test_the_default_is_chat_with_speech(self) -> None:
        args = self.parse()
        assert (args.backend, args.endpoint) == ("openai-chat-omni", "/v1/chat/completions")
        assert args.percentile_metrics == "ttft,tpot,itl,e2el"

    @pytest.mark.parametrize(
        ("backend", "endpoint"),
        [
            ("openai-audio-speech", "/v1/audio/speech"),
            ("openai-images", "/v1/images/generations"),
            ("openai", "/v1/completions"),
        ],
    )
    def test_a_backend_has_its_endpoint(self, backend: str, endpoint: str) -> None:
        assert self.parse("--backend", backend).endpoint == endpoint
        assert self.parse("--backend", backend, "--endpoint", "/proxy" + endpoint).endpoint == "/proxy" + endpoint

    def test_the_tokenizer_of_a_diffusers_model_is_found(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer").mkdir()
        (tmp_path / "tokenizer" / "tokenizer_config.json").touch()
        arguments = ("--backend", "openai-images", "--model", str(tmp_path))
        assert self.parse(*arguments).tokenizer == str(tmp_path / "tokenizer")
        assert self.parse(*arguments, "--tokenizer", "other").tokenizer == "other"

    def test_the_tokenizer_of_an_installed_model_is_found(self) -> None:
        shapes = Path(find_checkpoint("shapes"))
        assert self.parse("--model", "shapes").tokenizer == str(shapes)
        assert self.parse("--model", "shapes-painter").tokenizer == str(
            shapes.with_name("shapes-painter") / "tokenizer"
        )
        assert self.parse("--model", "talk").tokenizer is None  # It is converted with the weights.
        assert self.parse("--model", "talk", "--tokenizer", "shapes").tokenizer == str(shapes)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--backend", "openai-speech"], "invalid choice: 'openai-speech' (choose from"),
            (
                ["--endpoint", "/v1/completions"],
                "--backend openai-chat-omni needs one that ends with /chat/completions",
            ),
            (["--goodput", "tpot:20"], "openai-chat-omni has ttft and e2el only"),
            (["--num-prompt-s", "3"], "did you mean '--num-prompts'?"),
        ],
    )
    def test_errors_name_the_option(self, run: Any, arguments: list[str], message: str) -> None:
        result = run("bench", "serve", "--omni", *arguments)
        assert result.code == 2
        assert message in result.err

    def test_help_names_the_backends(self, run: Any) -> None:
        result = run("bench", "serve", "--help")
        assert result.code == 0
        assert "usage: vllm bench serve --omni" in result.out and "Traceback" not in result.err
        assert all(name in result.out for name in BACKENDS)
        assert "openai-audio-speech" in run("bench", "serve", "--help=backend").out

    def test_other_benchmarks_are_vllms(self, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        import vllm.entrypoints.cli.main as vllm_cli

        calls = []
        monkeypatch.setattr(vllm_cli, "main", lambda: calls.append(1))
        assert run("bench", "latency").code == 0 and calls == [1]

    def test_a_server_that_is_not_there_is_one_line(self, run: Any) -> None:
        result = run("bench", "serve", "--port", "1")
        assert result.code == 1
        assert "vllm-omni: error: bench serve: Failed to fetch models from server" in result.err


class Session:
    """One answer, whose pieces arrive a second apart."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, pieces: Sequence[bytes], content_type: str = "", **headers: str
    ) -> None:
        self.payload: dict[str, Any] = {}
        self._now = 100.0
        self._pieces = pieces
        monkeypatch.setattr(bench_requests, "time", SimpleNamespace(perf_counter=lambda: self._now))
        self.response = SimpleNamespace(
            status=200, content=self, content_type=content_type, headers=headers, text=self.text, read=self.read
        )

    @asynccontextmanager
    async def post(self, url: str, json: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[SimpleNamespace]:
        self.payload = json
        yield self.response

    async def iter_any(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            self._now += 1
            yield piece

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.iter_any()])

    async def text(self) -> str:
        return (await self.read()).decode()

    def send(self, backend: str, **extra_body: Any) -> OmniRequestFuncOutput:
        request = RequestFuncInput("Hi", "http://host/v1", 3, 16, "model", extra_body=extra_body)
        return asyncio.run(BACKENDS[backend].request(request, self))  # type: ignore[arg-type]


def event(**delta: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"


def audio(data: bytes) -> bytes:
    return event(audio={"data": base64.b64encode(data).decode()})


USAGE = {"prompt_tokens": 9, "completion_tokens": 7, "completion_tokens_details": {"audio_tokens": 4}}
END = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\ndata: [DONE]\n\n"
HEADER = wav_header(24_000, 1)
SECOND = bytes(48_000)


class TestChat:
    def test_text_and_speech_have_times_of_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first = audio(HEADER[:20])
        stream = [
            event(role="assistant", content=""), event(content="A"), first[:30], first[30:], audio(HEADER[20:]),
            event(content="B") + event(content="C"), audio(SECOND), event(content="D"), audio(SECOND), END,
        ]  # fmt: skip
        session = Session(monkeypatch, stream)
        output = session.send("openai-chat-omni", audio={"voice": "ethan"})

        assert (output.success, output.error, output.generated_text) == (True, "", "ABCD")
        assert (output.ttft, output.itl, output.text_latency) == (2, [4, 0, 2], 8)
        assert (output.ttfa, output.audio_duration, output.latency) == (7, 2, 10)
        assert (output.prompt_len, output.output_tokens) == (9, 3)
        assert session.payload["audio"] == {"format": "wav", "voice": "ethan"}
        assert session.payload["modalities"] == ["text", "audio"] and session.payload["stream"]

    def test_speech_alone_has_its_transcript_as_text(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = [event(audio={"transcript": "A"}), audio(SECOND), END]
        session = Session(monkeypatch, stream)
        output = session.send("openai-chat-omni", modalities=["audio"], audio={"format": "pcm16"})
        assert (output.generated_text, output.ttft, output.ttfa, output.audio_duration) == ("A", 1, 2, 1)

    def test_a_text_request_needs_no_audio(self, monkeypatch: pytest.MonkeyPatch) -> None:
        output = Session(monkeypatch, [event(content="A"), END]).send("openai-chat-omni", modalities=["text"])
        assert output.success and not output.ttfa

    @pytest.mark.parametrize(
        ("stream", "extra_body", "error"),
        [
            ([event(content="A"), END], {}, "the answer has no audio: serve a model that speaks, or"),
            ([event(content="A"), audio(HEADER), END], {}, "the answer has no audio"),
            ([audio(b"ID3" + SECOND)], {}, "the audio is not 16-bit WAV"),
            ([audio(HEADER + SECOND)], {}, "the stream ended before [DONE]"),
            ([b'data: {"error": {"message": "a stage died"}}\n\n', END], {}, "a stage died"),
            ([], {"audio": {"format": "mp3"}}, "--extra-body: audio.format must be wav or pcm16, not mp3"),
        ],
    )
    def test_failures(
        self, monkeypatch: pytest.MonkeyPatch, stream: list[bytes], extra_body: dict[str, Any], error: str
    ) -> None:
        output = Session(monkeypatch, stream).send("openai-chat-omni", **extra_body)
        assert not output.success and output.error.startswith(error)


class TestSpeech:
    def test_bytes_are_seconds_at_the_rate_of_the_headers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        headers = {"X-Sample-Rate": "12000", "X-Channels": "2"}
        output = Session(monkeypatch, [SECOND, SECOND], "audio/pcm", **headers).send("openai-audio-speech")
        assert (output.success, output.ttft, output.ttfa, output.latency) == (True, 1, 1, 2)
        assert output.audio_duration == 2

    def test_other_servers_speak_in_24_khz(self, monkeypatch: pytest.MonkeyPatch) -> None:
        session = Session(monkeypatch, [SECOND], "audio/pcm")
        assert session.send("openai-audio-speech", voice="alloy").audio_duration == 1
        assert session.payload == {"model": "model", "input": "Hi", "response_format": "pcm", "voice": "alloy"}

    def test_failures(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert Session(monkeypatch, [], "audio/pcm").send("openai-audio-speech").error == "the answer has no audio"
        output = Session(monkeypatch, [SECOND], "audio/mpeg").send("openai-audio-speech", response_format="mp3")
        assert output.error.startswith("the answer is audio/mpeg, not audio/pcm: --extra-body must leave")


def test_images_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(monkeypatch, [b'{"data": [{"b64_json": ""}, ', b'{"b64_json": ""}]}'])
    output = session.send("openai-images", n=2)
    assert (output.success, output.num_images, output.latency) == (True, 2, 2)
    assert session.payload == {"model": "model", "prompt": "Hi", "n": 2}
    assert Session(monkeypatch, [b'{"data": []}']).send("openai-images").error == "the answer has no images"


@pytest.mark.parametrize("body", [b'{"error": {"message": "no such model"}}', b"no such model"])
def test_a_refused_request_has_the_servers_message(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    session = Session(monkeypatch, [body])
    session.response.status = 404
    for backend in BACKENDS:
        assert session.send(backend).error == "404 no such model"


def test_wav_headers_are_read_wherever_they_are_cut() -> None:
    stereo = wav_header(48_000, 2) + bytes(4 * 48_000)
    for cut in range(1, 50):
        pcm = PcmCounter(is_wav=True)
        assert pcm.add(stereo[:cut]) == (cut > 44)
        assert pcm.add(stereo[cut:]) and pcm.seconds == 1


def output(ttfa: float, latency: float, audio_duration: float, **more: Any) -> OmniRequestFuncOutput:
    return OmniRequestFuncOutput(success=True, ttfa=ttfa, latency=latency, audio_duration=audio_duration, **more)


class TestMetrics:
    def values(self, outputs: list[OmniRequestFuncOutput]) -> dict[str, float]:
        tables = bench.omni_tables(outputs, duration_s=10.0, percentiles=[50, 99.9])
        return {row.key: row.value for rows in tables.values() for row in rows}

    def test_speech(self) -> None:
        values = self.values([output(1.0, 4.0, 8.0), output(3.0, 6.0, 4.0), OmniRequestFuncOutput(ttfa=9.0)])
        assert values["total_audio_s"] == 12.0 and values["audio_throughput"] == 1.2
        assert values["mean_ttfa_ms"] == values["p50_ttfa_ms"] == 2000.0 and values["std_ttfa_ms"] == 1000.0
        assert values["mean_rtf"] == 1.0 and values["p99.9_rtf"] == pytest.approx(1.499)
        assert not [key for key in values if "image" in key]

    def test_images(self) -> None:
        values = self.values([output(0.0, 1.0, 0.0, num_images=3), output(0.0, 1.0, 0.0, num_images=2)])
        assert values == {"total_images": 5, "image_throughput": 0.5}
        assert self.values([]) == {}

    def test_rows_look_like_vllms(self) -> None:
        assert str(bench.Row("Mean TTFA (ms):", "mean_ttfa_ms", 12.345)) == f"{'Mean TTFA (ms):':<40} {'12.35':<10}"

    def test_time_per_token_ends_with_the_text_and_latency_with_the_speech(self) -> None:
        spoken = output(2.0, 9.0, 5.0, ttft=1.0, text_latency=3.0, output_tokens=5)
        benchmark = bench.OmniBenchmark()
        metrics, lengths = benchmark.calculate_metrics(
            input_requests=[], outputs=[spoken], dur_s=10.0, tokenizer=None, selected_percentiles=[99],
            goodput_config_dict={},
        )  # fmt: skip
        assert (metrics.mean_tpot_ms, metrics.percentiles_tpot_ms) == (500.0, [(99, 500.0)])
        assert (metrics.mean_e2el_ms, metrics.mean_ttft_ms, lengths) == (9000.0, 1000.0, [5])
        assert benchmark.outputs == [spoken]


def test_vllm_calls_what_we_replace() -> None:
    """By name, in its own module, and with keywords."""
    main = inspect.getsource(vllm_serve.main_async)
    assert "benchmark_result = await benchmark(\n" in main and "input_requests = get_samples(args, tokenizer)" in main
    assert "metrics, actual_output_lens = calculate_metrics(\n            input_requests=" in inspect.getsource(
        vllm_serve.benchmark
    )
    original = vllm_serve.benchmark
    with bench.OmniBenchmark().installed():
        assert vllm_serve.benchmark is not original
    assert vllm_serve.benchmark is original


@pytest.mark.slow
class TestServers:
    def bench(self, run: Any, server: RunningServer, folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
        result = run(
            "bench", "serve", "--model", server.model, f"--base-url={server.url}", "--dataset-name=random",
            "--input-len=8", "--output-len=4", "--num-prompts=3", "--max-concurrency=2", "--disable-tqdm",
            "--save-result", f"--result-dir={folder}", "--result-filename=result.json", *arguments,
        )  # fmt: skip
        assert result.code == 0, result.err
        return result.out, json.loads((folder / "result.json").read_text())

    def test_chat_with_speech(self, run: Any, omni_server: RunningServer, tmp_path: Path) -> None:
        shown, result = self.bench(run, omni_server, tmp_path, "--save-detailed")
        for line in (
            "Mean TTFT (ms):",
            "Mean TPOT (ms):",
            "Mean ITL (ms):",
            "Mean E2EL (ms):",
            "P99 TTFA (ms):",
            "Mean RTF:",
        ):
            assert line in shown
        assert (result["completed"], result["total_output_tokens"]) == (3, 12)
        assert result["total_audio_s"] == pytest.approx(sum(result["audio_durations"]))
        assert min(result["audio_durations"]) > 0
        assert 0 < result["mean_ttft_ms"] < result["mean_ttfa_ms"] < result["mean_e2el_ms"]

    def test_speech(self, run: Any, omni_server: RunningServer, tmp_path: Path) -> None:
        shown, result = self.bench(run, omni_server, tmp_path, "--backend=openai-audio-speech")
        assert "Audio throughput (audio s/s):" in shown and "TTFT" not in shown and "generated tokens" not in shown
        assert result["completed"] == 3 and result["audio_throughput"] > 0 and "output_throughput" not in result

    def test_images(self, run: Any, image_server: RunningServer, tmp_path: Path) -> None:
        extra = '--extra-body={"size": "32x32", "n": 2, "num_inference_steps": 1}'
        shown, result = self.bench(run, image_server, tmp_path, "--backend=openai-images", extra)
        assert "Image throughput (images/s):" in shown and "TTFA" not in shown
        assert (result["completed"], result["total_images"]) == (3, 6)

    def test_a_server_without_sound_fails(self, run: Any, image_server: RunningServer) -> None:
        result = run(
            "bench", "serve", "--model", image_server.model, f"--base-url={image_server.url}", "--num-prompts=2",
            "--dataset-name=random", "--input-len=8", "--disable-tqdm", '--extra-body={"modalities": ["audio"]}',
        )  # fmt: skip
        assert result.code == 1
        assert "all 2 requests failed; the first: 400 this model cannot output 'audio'" in result.err
