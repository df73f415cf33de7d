# SPDX-License-Identifier: Apache-2.0
"""What a trainer computes for sampled tokens and codes is what their outputs say, alone and among others."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from tests.entrypoints.conftest import start
from tests.model_executor.models.qwen2_5_omni import helpers as qwen2_5_omni
from vllm_omni import OmniLLM, OmniRequestOutput
from vllm_omni.config.utils import stage_configs_dir
from vllm_omni.testing.hf_oracle import HFOracle
from vllm_omni.testing.oracles.base import NoSpeech
from vllm_omni.testing.oracles.csm import CsmReference, as_conversation

ATOL, RTOL = 1e-5, 1e-6
"""Logits of these models are in the tens, of which float32 has six digits after the point."""
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": 0}
TEXTS = ["a hen", "two hens and a fox", "what is this"]
CODES = "codes"


def log_probs_of(output: OmniRequestOutput, index: int = 0) -> torch.Tensor:
    """Of the sampled tokens, `[tokens]`."""
    choice = output.outputs[index]
    assert choice.logprobs is not None
    return torch.tensor([row[token].logprob for row, token in zip(choice.logprobs, choice.token_ids, strict=True)])


def gather(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def check(output: OmniRequestOutput, logits: torch.Tensor) -> None:
    """`logits`: `[tokens, vocab]`, the reference's, before each token of an output of codes."""
    expected = gather(logits, torch.tensor(output.outputs[0].token_ids))
    torch.testing.assert_close(log_probs_of(output), expected, atol=ATOL, rtol=RTOL)


@torch.no_grad()
def test_log_probabilities_of_sampled_tokens(tiny_qwen3: Path) -> None:
    params = {**SAMPLED, "n": 4, "max_tokens": 24, "ignore_eos": True, "seed": 1}
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    with start(tiny_qwen3, max_model_len=256) as llm:
        outputs = [*llm.generate(TEXTS, [params], use_tqdm=False), *llm.generate(TEXTS[:1], [params], use_tqdm=False)]
    for output in outputs:
        for index, choice in enumerate(output.outputs):
            tokens = torch.tensor([*(output.prompt_token_ids or ()), *choice.token_ids])
            logits = model(tokens[None]).logits[0, -len(choice.token_ids) - 1 : -1]
            expected = gather(logits, torch.tensor(choice.token_ids))
            torch.testing.assert_close(log_probs_of(output, index), expected, atol=ATOL, rtol=RTOL)


@contextmanager
def with_codes(model: Path, name: str, stage_id: int, folder: Path, **engine_args: Any) -> Iterator[OmniLLM]:
    """The shipped pipeline, with the codes of this stage among its outputs."""
    config = yaml.safe_load((stage_configs_dir() / f"{name}.yaml").read_text())
    config["stage_args"][stage_id] |= {"final_output": True, "final_output_type": CODES}
    config["stage_args"][stage_id]["engine_args"] |= engine_args
    file = folder / "pipeline.yaml"
    file.write_text(yaml.safe_dump(config))
    limits: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20}
    with OmniLLM(str(model), str(file), dtype="float32", enforce_eager=True, **limits) as llm:
        yield llm


def frames_of(output: OmniRequestOutput) -> torch.Tensor:
    """`[frames, codes]`. The frame of the last token is made only if it ends the speech: of its zeros, as CSM's."""
    frames, tokens = output.multimodal_output[CODES], output.outputs[0].token_ids
    assert len(tokens) - 1 <= len(frames) <= len(tokens) and len(frames) > 1
    assert frames[:, 0].tolist() == list(tokens)[: len(frames)]
    return frames


@pytest.mark.slow
@pytest.mark.parametrize("logprobs_mode", ["raw_logprobs", "processed_logprobs"])
@torch.no_grad()
def test_log_probabilities_of_sampled_codes(tiny_csm: Path, tmp_path: Path, logprobs_mode: str) -> None:
    """Of each frame's first code: `raw` ones are of all ids of the model's head, `processed` ones of what is sampled
    from, which is codes only."""
    reference = CsmReference(tiny_csm)
    params: list[Any] = [{**SAMPLED, "min_tokens": 8, "max_tokens": 20, "seed": 1}, None]
    with with_codes(tiny_csm, "csm", 0, tmp_path, logprobs_mode=logprobs_mode) as llm:
        outputs = [each for texts in (TEXTS, TEXTS[:1]) for each in llm.generate(texts, params, use_tqdm=False)]
    found = [output for output in outputs if output.final_output_type == CODES]
    for prompt, output in zip([*TEXTS, TEXTS[0]], found, strict=True):
        fed_back = frames_of(output)[: len(output.outputs[0].token_ids) - 1]
        inputs: Any = reference.processor.apply_chat_template(
            as_conversation({"prompt": prompt}), tokenize=True, return_dict=True
        )
        first = reference.model(**inputs, use_cache=True)
        later = reference.model(input_ids=fed_back[None], past_key_values=first.past_key_values)
        logits = torch.cat([first.logits[0, -1:], later.logits[0]])
        if logprobs_mode == "processed_logprobs":
            logits[:, reference.model.config.codec_config.codebook_size :] = float("-inf")
        check(output, logits)


def speak(llm: OmniLLM) -> list[tuple[dict[str, Any], OmniRequestOutput, OmniRequestOutput]]:
    """Prompts, several at once and one alone, with the thinker's text and the talker's codes."""
    prompts: list[Any] = [{"prompt": f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"} for text in TEXTS]
    params: list[Any] = [{"temperature": 0.0, **REPLY}, {**SAMPLED, "max_tokens": 20, "seed": 1}, None]
    outputs = [each for given in (prompts, prompts[:1]) for each in llm.generate(given, params, use_tqdm=False)]
    texts, codes = ([it for it in outputs if it.final_output_type == kind] for kind in ("text", CODES))
    return list(zip([*prompts, prompts[0]], texts, codes, strict=True))


REPLY = {"min_tokens": 6, "max_tokens": 12}


@pytest.mark.slow
@torch.no_grad()
def test_log_probabilities_of_a_talker_of_frames(tiny_qwen3_omni_moe: Path, tmp_path: Path) -> None:
    """Its input is what transformers makes of the same reply, and the frames that were sampled."""
    with with_codes(tiny_qwen3_omni_moe, "qwen3_omni_moe", 1, tmp_path) as llm:
        spoken = speak(llm)
    oracle = HFOracle(tiny_qwen3_omni_moe, num_threads=1)
    talker = oracle.model.talker
    tables = [talker.get_input_embeddings(), *talker.code_predictor.get_input_embeddings()]
    for prompt, text, output in spoken:
        reference = oracle.generate(prompt, thinker_min_tokens=6, thinker_max_tokens=12, talker_max_tokens=2)
        assert list(text.outputs[0].token_ids) == reference.thinker_token_ids
        frames, inputs = frames_of(output), reference.talker_inputs
        assert len(frames) == len(output.outputs[0].token_ids) - 1
        fed_back = sum(table(codes) for table, codes in zip(tables, frames.T, strict=True))  # [frames, hidden]
        spoken_text = inputs["trailing_text_hidden"][0, : len(frames)]
        padding = inputs["tts_pad_embed"][0].expand(len(frames) - len(spoken_text), -1)
        rows = torch.cat([inputs["inputs_embeds"][0], fed_back + torch.cat([spoken_text, padding])])
        check(output, talker(inputs_embeds=rows[None]).logits[0, -len(frames) - 1 :])


@pytest.mark.slow
@torch.no_grad()
def test_log_probabilities_of_a_talker_of_tokens(tiny_qwen2_5_omni: Path, tmp_path: Path) -> None:
    """It reads what the thinker computes of each token, 1e-5 from exact, and its codes' probabilities are five times as
    far: transformers in float32 is as far from itself in float64 as the pipeline is."""
    with with_codes(tiny_qwen2_5_omni, "qwen2_5_omni", 1, tmp_path) as llm:
        spoken = speak(llm)
    config = AutoConfig.from_pretrained(tiny_qwen2_5_omni)
    trainer = HFOracle(tiny_qwen2_5_omni, num_threads=1)
    exact = HFOracle(tiny_qwen2_5_omni, dtype=torch.float64, num_threads=1)
    compute_norms_as_the_rest(exact.model)
    for oracle in (trainer, exact):
        oracle.model.talker.generate = refuse_speech
    errors, rounding = [], []
    for prompt, text, output in spoken:
        tokens, expected = list(output.outputs[0].token_ids), []
        for oracle in (trainer, exact):
            reference = oracle.generate(prompt, thinker_min_tokens=6, thinker_max_tokens=12, talker_max_tokens=2)
            assert list(text.outputs[0].token_ids) == reference.thinker_token_ids and len(tokens) > 2
            read = qwen2_5_omni.Case(prompt, {}, reference, None).talker_input(config).additional_information
            expected.append(qwen2_5_omni.log_probs_of(oracle.model, read, tokens).double())
        errors.append(float((log_probs_of(output).double() - expected[1]).abs().max()))
        rounding.append(float((expected[0] - expected[1]).abs().max()))
    assert max(errors) < 1.5 * max(rounding) < 1.5e-4, (errors, rounding)


def refuse_speech(**kwargs: Any) -> None:
    """In place of a talker's `generate`: the reference of the thinker is all that is needed."""
    raise NoSpeech


def compute_norms_as_the_rest(model: torch.nn.Module) -> None:
    """Those of transformers compute in float32, also in a model of float64."""

    def forward(self: Any, rows: torch.Tensor) -> torch.Tensor:
        return self.weight * (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.variance_epsilon))

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(forward, module)
