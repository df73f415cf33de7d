# SPDX-License-Identifier: Apache-2.0
"""The page that `vllm serve --omni --help` prints: usage, examples, the groups of options, and how to see each.

It needs no parser. That of vLLM takes a core many seconds to build, because it imports all that has an option.
"""

import textwrap
from pathlib import Path

DESCRIPTION = """\
Serve a model as a pipeline of stages, each an engine in its own process, with vLLM's
OpenAI-compatible server. It has the flags of `vllm serve` that apply to a pipeline. An engine flag
reaches every stage that has such an argument, and wins over the stage configuration. Without the flag
the value in the stage configuration holds. Sizes in bytes may have a unit: 4096, 512MiB, 4GiB.
"""
SERVE_USAGE = "vllm serve MODEL --omni [options]"
CONFIG_USAGE = "vllm-omni config show MODEL [--json] [options of vllm serve MODEL --omni]"
CONFIG_DESCRIPTION = "Print the stage configuration that `vllm serve MODEL --omni` with these options would run.\n"

GROUPS = {
    "Omni": "The pipeline: stages, timeouts, limits and traces.",
    "OmniAPI": "OpenAI's API: default outputs of chat, names of voices, and the page for a browser.",
    "OmniDiffusion": "Diffusion stages: how they are loaded and run, and limits of requests.",
    "OmniLimits": "Limits of requests, and of what the server stores.",
}
"""Groups of our options, in order."""
VLLM_GROUPS = (
    "AttentionConfig", "CacheConfig", "CompilationConfig", "Frontend", "KernelConfig", "LoadConfig", "LoggingConfig",
    "LoRAConfig", "MambaConfig", "ModelConfig", "MultiModalConfig", "ObservabilityConfig", "OffloadConfig",
    "ParallelConfig", "SchedulerConfig", "StructuredOutputsConfig", "VllmConfig",
)  # fmt: skip
"""vLLM's groups; `Frontend` is its server."""

HINT = """\
All options of a group:        --help=omni, --help=omnilimits, --help=frontend, ...
Options with these words:      --help=max-model-len
All options:                   --help=all
The configuration that runs:   vllm-omni config show MODEL [options]
This machine, and the model:   vllm-omni doctor MODEL [options]
"""

_WIDTH = 100


def serve_page() -> str:
    examples = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    return _page(f"{SERVE_USAGE}\n       vllm-omni serve MODEL [options]", f"{DESCRIPTION}\n{examples}")


def config_page() -> str:
    return _page(CONFIG_USAGE, CONFIG_DESCRIPTION)


def _page(usage: str, text: str) -> str:
    width = max(map(len, GROUPS)) + 2
    ours = [f"  {name:<{width}}{about}" for name, about in GROUPS.items()]
    theirs = textwrap.fill(
        ", ".join(VLLM_GROUPS), _WIDTH, initial_indent=f"  {'of vLLM':<{width}}", subsequent_indent=" " * (width + 2)
    )
    return "\n".join([f"usage: {usage}\n", text, "Options, by group:", *ours, theirs, "", HINT.rstrip(), ""])
