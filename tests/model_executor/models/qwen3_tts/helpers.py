# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS's stages on tiny checkpoints, and what the reference made of these (see `make_fixtures`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.model_executor.models.engines import TIGHT, start_engine
from tests.model_executor.models.speech import SpeechCase, SpeechCodec, SpeechModel
from vllm_omni.config.loader import load_pipeline_config
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.model_executor.prompt_processor import PromptProcessor, load_prompt_processor
from vllm_omni.model_executor.stage_input_processor import load_stage_input_processor

from .prompts import MAX_FRAMES, PROMPTS

FIXTURES = Path(__file__).parent / "fixtures"
AUDIO_STEP = 61
GREEDY = {"temperature": 0.0, "repetition_penalty": 1.05, "min_tokens": 2, "max_tokens": MAX_FRAMES + 1}


def as_prompt(prompt: dict[str, Any], kind: str, size: str) -> dict[str, Any]:
    """A prompt with our names of the reference's fields."""
    fields = dict(prompt["additional_information"])
    fields.pop("x_vector_only_mode", None)  # without ref_text
    instructions = fields.pop("instruct", None)
    is_dropped = (kind, size) == ("qwen3_tts", "large")  # By the reference, which does not refuse them.
    if instructions is not None and not is_dropped:
        fields["instructions"] = instructions
    return {"prompt": prompt["prompt"], "additional_information": fields}


def read_cases(kind: str, size: str, fixtures: Path = FIXTURES) -> dict[str, SpeechCase]:
    made = load_file(fixtures / f"{size}.safetensors")
    cases = {}
    for name, prompt in PROMPTS[kind].items():
        ref_codes = made.get(f"{kind}/{name}/ref_codes")
        cases[name] = SpeechCase(
            prompt=as_prompt(prompt, kind, size),
            codes=made[f"{kind}/{name}/codes"].long(),
            audio=made[f"{kind}/{name}/audio"],
            audio_step=AUDIO_STEP,
            ref_codes=None if ref_codes is None else ref_codes.long(),
        )
    return cases


def load_prompts(checkpoint: Path) -> PromptProcessor:
    processor = load_prompt_processor(
        load_pipeline_config(stage_configs_dir() / "qwen3_tts.yaml").stages[0], str(checkpoint)
    )
    assert processor is not None
    return processor


@contextmanager
def start_talker(checkpoint: Path, cases: dict[str, SpeechCase]) -> Iterator[SpeechModel]:
    engine = start_engine(
        checkpoint,
        engine_output_type="codes",
        enable_prompt_embeds=True,
        skip_tokenizer_init=True,
        generation_config="vllm",
        **TIGHT | {"max_model_len": 128, "num_gpu_blocks_override": 6},  # Its prompts are short.
    )
    yield SpeechModel(engine, load_prompts(checkpoint), cases, GREEDY)
    engine.close()


@contextmanager
def start_codec(checkpoint: Path) -> Iterator[SpeechCodec]:
    folder = checkpoint / "speech_tokenizer"
    engine = start_engine(
        folder,
        engine_type="generation",
        model_arch="Qwen3TTSCodec",
        hf_config_name="decoder_config",
        engine_output_type="audio",
        max_model_len=512,
    )
    stage = load_pipeline_config(stage_configs_dir() / "qwen3_tts.yaml").stages[1]
    processor = load_stage_input_processor(stage, str(folder))
    assert processor is not None
    yield SpeechCodec(engine, processor)
    engine.close()
