# SPDX-License-Identifier: Apache-2.0
"""A part of `streaming.py`: the speech of a large Qwen3-Omni on one GPU, beside HF transformers.

The widths are those of Qwen3-Omni-30B-A3B, the weights random, in bfloat16. Of its 48 layers and 128 experts the
thinker has what the GPU has memory for, 16 and 8 at least; 16 experts at most, because the checkpoint is written first.
HF runs alone, and leaves the GPU before the pipeline starts. Prompts, clients and columns are those of streaming; a
result is 3 seconds of speech with `--quick`, else 10. `--tiny` tries all of it on a CPU.
"""

import gc
import shutil
import sys
import tempfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from backends import HF_PROMPTS, TEXT_TOKENS, Client, HFBackend, Load, Measurement, Plan, row_of, sampling_params
from report import Cell, Report, progress

from vllm_omni import AsyncOmniLLM
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.media import mixed_prompts
from vllm_omni.testing.tiny import qwen3_omni_moe
from vllm_omni.testing.tiny.qwen3_omni_moe import Size

MODEL = "qwen3_omni_moe"
LARGEST = Size(
    hidden=2048,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
    experts=16,
    expert_hidden=768,
    tower_hidden=256,
    tower_layers=4,
    deepstack=(1, 2),
    accept_layer=14,
    talker_hidden=1024,
    talker_layers=20,
    talker_heads=16,
    talker_expert_hidden=384,
    predictor_layers=5,
    code_groups=16,
    codebook=2048,
    vocoder_hidden=1024,
    vocoder_layers=8,
    vocoder_window=72,
    decoder_dim=1536,
    layer_gain=1.1,
)
SHARES = {"thinker": 0.6, "talker": 0.2, "code2wav": 0.1}
"""Of the GPU's memory; a part is left to the process that had HF on it."""


def fitting(gpu_gib: float, disk_gib: float) -> Size:
    """What there is room for. A layer of 8 experts takes 0.11 GiB of the GPU in bfloat16, 8 further ones of all layers
    3.4 GiB, and twice as much of the disk in float32."""
    layers = int(min(2 * gpu_gib, 2 * disk_gib))
    experts = 16 if min(gpu_gib, disk_gib) >= 32 else 8
    return replace(LARGEST, layers=max(16, min(layers, LARGEST.layers)), experts=experts)


def measure_hf(path: Path, dtype: torch.dtype, device: str, plan: Plan) -> HFBackend:
    progress(f"HF transformers, {HF_PROMPTS} requests")
    load = Load(plan.rounds, HF_PROMPTS, 1, TEXT_TOKENS, plan.talker_tokens(MODEL))
    backend = HFBackend(HFOracle(path, dtype, device=device), load, threads=1)
    prompts = mixed_prompts(path, HF_PROMPTS)
    backend.warm_up(prompts)
    for _ in range(plan.rounds):
        backend.run(prompts)
    return backend


def measure_pipeline(path: Path, engine_args: dict[str, Any], plan: Plan) -> dict[int, Measurement]:
    """By the number of clients; the first round warms up."""
    progress("starting the pipeline")
    measurements = {concurrency: Measurement() for concurrency in plan.concurrencies}
    params = sampling_params(TEXT_TOKENS, plan.talker_tokens(MODEL))
    limits = {"max_model_len": 2048, "max_num_seqs": max(plan.concurrencies)}
    with AsyncOmniLLM(str(path), **limits, **engine_args) as llm:
        client = Client(llm, params, streams=True)
        for number in range(1 + plan.rounds):
            for concurrency, measurement in measurements.items():
                progress(f"{concurrency} clients, " + (f"round {number} of {plan.rounds}" if number else "warming up"))
                seconds, responses = client.run(mixed_prompts(path, max(4, concurrency)), concurrency)
                if number:
                    measurement.seconds += seconds
                    measurement.responses += responses
    return measurements


def measure(args: Namespace) -> Report:
    plan = Plan(sorted(args.concurrency or [1, 8, 64]), *((1, 3.0) if args.quick else (2, 10.0)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.tiny:
        size, dtype = Size(), torch.float32
    elif device == "cpu":
        sys.exit("--part large needs an NVIDIA GPU; --tiny does without one")
    else:
        free = torch.cuda.mem_get_info()[0], shutil.disk_usage(tempfile.gettempdir()).free
        size, dtype = fitting(*(count / 2**30 for count in free)), torch.bfloat16
    size = replace(size, layers=args.layers or size.layers, experts=args.experts or size.experts)
    settings: dict[str, Cell] = {
        "layers": size.layers,
        "experts": size.experts,
        "dtype": str(dtype).removeprefix("torch."),
    }
    report = Report("large_omni", settings | {"speech": f"{plan.speech_seconds:g} s"})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        progress("writing the checkpoint")
        qwen3_omni_moe.write(path, 0, size)
        hf = measure_hf(path, dtype, device, plan)
        rows = {concurrency: row_of(hf.figures(concurrency), plan) for concurrency in plan.concurrencies}
        del hf
        gc.collect()
        engine_args: dict[str, Any] = {"dtype": settings["dtype"]}
        if device == "cuda":
            torch.cuda.empty_cache()
            engine_args["stage_overrides"] = {name: {"gpu_memory_utilization": share} for name, share in SHARES.items()}
        measurements = measure_pipeline(path, engine_args, plan)
    for concurrency, measurement in measurements.items():
        report.rows.append({"backend": "vllm_omni", "clients": concurrency, **measurement.row()})
        report.rows.append({"backend": "HF transformers", "clients": concurrency, **rows[concurrency]})
        for name, key in {"tokens": "tokens/s", "sound": "sound s/s"}.items():
            report.ratios[f"{name}_per_second_c{concurrency}"] = measurement.row()[key] / rows[concurrency][key]
        report.ratios[f"first_sound_speedup_c{concurrency}"] = rows[concurrency]["TTFA p50 s"] / measurement.first_audio
    report.notes.append("ratios are ours to HF's, higher is better; HF's sound comes whole, one request after another")
    return report
