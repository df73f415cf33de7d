# SPDX-License-Identifier: Apache-2.0
"""Complete checkpoints of real architectures in tiny sizes, written in seconds without any download.

    python -m vllm_omni.testing.tiny_checkpoints qwen3_omni_moe DIR [--seed N] [--size default|large]

Weights are random. Each checkpoint loads in HF transformers and in vLLM like the real one. One module of
`vllm_omni.testing.tiny` writes each; other packages declare theirs in `ModelPackage.tiny_checkpoints`.
"""

import argparse
import difflib
import importlib
import sys
from pathlib import Path

import torch
from transformers.utils import logging

from vllm_omni.model_packages import find_models

TINY_CHECKPOINTS = {
    "qwen3": "vllm_omni.testing.tiny.qwen3",
    "qwen2_5_omni": "vllm_omni.testing.tiny.qwen2_5_omni",
    "qwen3_omni_moe": "vllm_omni.testing.tiny.qwen3_omni_moe",
    "qwen3_tts": "vllm_omni.testing.tiny.qwen3_tts",
    "qwen3_tts_design": "vllm_omni.testing.tiny.qwen3_tts:write_design",
    "qwen3_tts_base": "vllm_omni.testing.tiny.qwen3_tts:write_base",
    "csm": "vllm_omni.testing.tiny.csm",
    "ace_step": "vllm_omni.testing.tiny.ace_step",
    "flux": "vllm_omni.testing.tiny.flux",
    "flux2_klein": "vllm_omni.testing.tiny.flux2_klein",
    "glm_image": "vllm_omni.testing.tiny.glm_image",
    "higgs_audio_v2": "vllm_omni.testing.tiny.higgs_audio_v2",
    "hunyuan_video_15": "vllm_omni.testing.tiny.hunyuan_video_15",
    "janus": "vllm_omni.testing.tiny.janus",
    "kandinsky5": "vllm_omni.testing.tiny.kandinsky5",
    "longcat_audio_dit": "vllm_omni.testing.tiny.longcat_audio_dit",
    "ltx2": "vllm_omni.testing.tiny.ltx2",
    "qwen_image": "vllm_omni.testing.tiny.qwen_image",
    "qwen_image_edit": "vllm_omni.testing.tiny.qwen_image_edit",
    "qwen_image_edit_plus": "vllm_omni.testing.tiny.qwen_image_edit_plus",
    "qwen_image_layered": "vllm_omni.testing.tiny.qwen_image_layered",
    "stable_audio": "vllm_omni.testing.tiny.stable_audio",
    "stable_diffusion_3": "vllm_omni.testing.tiny.stable_diffusion_3",
    "vibevoice": "vllm_omni.testing.tiny.vibevoice",
    "wan": "vllm_omni.testing.tiny.wan",
    "wan_i2v": "vllm_omni.testing.tiny.wan_i2v",
    "whisper": "vllm_omni.testing.tiny.whisper",
    "z_image": "vllm_omni.testing.tiny.z_image",
}
"""Name -> module with `SIZES` (names of sizes) and `write(path: Path, seed: int, size: str)`; or `module:function`."""


def write_tiny_checkpoint(
    name: str, path: str | Path, *, seed: int = 0, size: str = "default", force: bool = False
) -> Path:
    """Writes the checkpoint `name` into the folder `path`, which is created if needed.

    Args:
        name: A key of `TINY_CHECKPOINTS`, or of `tiny_checkpoints` of an installed package.
        seed: Equal seeds give identical files.
        size: `default` has hidden sizes about 100, `large` in the hundreds.
        force: Write into a folder that is not empty; files of the same name are replaced.

    Returns:
        `path`, as a `Path`.

    Raises:
        ValueError: Unknown name or size.
        FileExistsError: `path` is not empty and `force` is not set.
    """
    known = TINY_CHECKPOINTS | find_models().tiny_checkpoints
    if name not in known:
        raise ValueError(_unknown("tiny checkpoint", name, list(known)))
    module_name, _, function = known[name].partition(":")
    module = importlib.import_module(module_name)
    if size not in module.SIZES:
        raise ValueError(_unknown(f"size of {name}", size, list(module.SIZES)))
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is not a folder")
    if not force and path.is_dir() and any(path.iterdir()):
        raise FileExistsError(f"{path} is not empty; choose another folder, or set force (--force) to write into it")
    path.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):  # model constructors draw random weights, which are overwritten
        getattr(module, function or "write")(path, seed, size)
    return path


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_omni.testing.tiny_checkpoints",
        description="Write a complete tiny checkpoint with random weights.",
    )
    parser.add_argument("name", help=f"one of: {', '.join(TINY_CHECKPOINTS | find_models().tiny_checkpoints)}")
    parser.add_argument("path", type=Path, metavar="DIR", help="folder to write, created if needed")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give identical files (default 0)")
    parser.add_argument("--size", default="default", help="default, or large (hidden sizes in the hundreds)")
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    args = parser.parse_args(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        path = write_tiny_checkpoint(args.name, args.path, seed=args.seed, size=args.size, force=args.force)
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))
    megabytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e6
    print(f"{args.name} ({args.size}, seed {args.seed}): {megabytes:.1f} MB in {path}")
    return 0


def _unknown(kind: str, given: str, known: list[str]) -> str:
    near = difflib.get_close_matches(given, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind}: {given!r}{hint} Known: {', '.join(known)}"


if __name__ == "__main__":
    sys.exit(main())
