# SPDX-License-Identifier: Apache-2.0
"""What both Qwen-Omni models are tested for, stage by stage: a thinker, a talker, and a vocoder.

A model's conftest.py imports the fixtures and has `omni`; its tests inherit the classes.

The engines are tight on purpose: a batch of all cases does not fit into their KV cache and prompts do not fit into one
step, so that every batch runs through chunked prefills and preemptions. One request alone meets neither.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig
from vllm.sampling_params import SamplingParams

from tests.model_executor.models.engines import TIGHT, PreemptionCounter, run_engine, start_engine
from tests.model_executor.models.windows import Pieces, run_first_stage, run_stage
from vllm_omni.config.stage_config import WindowConfig
from vllm_omni.engine.omni_llm_engine import OmniLLMEngine
from vllm_omni.inputs import StageInput, StageRequest
from vllm_omni.model_executor.models.qwen_omni.stage_input_processors import TALKER_INPUT, QwenOmniThinkerToTalker
from vllm_omni.model_executor.stage_input_processor import StageInputProcessor
from vllm_omni.outputs import Completion, StageOutput, merge_stage_outputs
from vllm_omni.stage.engines.llm_request import ARRequest, GenerationRequest
from vllm_omni.testing.hf_oracle import HFOracle, OracleResult, hf_inputs
from vllm_omni.testing.media import HARD_KINDS, PROMPT_KINDS, make_prompts

THINKER_TOKENS, TALKER_TOKENS = 20, 32
THINKER = SamplingParams(temperature=0.0, max_tokens=THINKER_TOKENS)
TALKER = {"temperature": 0.0, "repetition_penalty": 1.05, "max_tokens": TALKER_TOKENS, "detokenize": False}
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.8}

MakeParams = Callable[..., SamplingParams]


@dataclass
class OmniCase(ABC):
    """One prompt and what HF makes of it.

    Attributes:
        prompt: As vLLM takes it.
        inputs: As HF takes it.
        speaker: None for the model's default.
    """

    to_talker: ClassVar[type[QwenOmniThinkerToTalker]]

    prompt: dict[str, Any]
    inputs: dict[str, Any]
    expected: OracleResult
    speaker: str | None

    @abstractmethod
    def thinker_rows(self, config: PretrainedConfig) -> torch.Tensor:
        """The rows that the talker reads, by the definition: `[prompt + reply - 1, hidden]`."""

    def check_speech(self, output: Any) -> None:
        """The output of a talker's engine."""
        assert list(output.outputs[0].token_ids) == self.expected.talker_token_ids

    def mm_metadata(self) -> dict[str, torch.Tensor]:
        names = {
            "image_grid_thw": "image_grid_thw",
            "video_grid_thw": "video_grid_thw",
            "video_second_per_grid": "second_per_grid_ts",
        }
        metadata = {ours: torch.as_tensor(self.inputs[hf]) for hf, ours in names.items() if hf in self.inputs}
        if "feature_attention_mask" in self.inputs:
            metadata["audio_feature_lengths"] = self.inputs["feature_attention_mask"].sum(1)
        return metadata

    def stage_request(self, request_id: str = "0", params: SamplingParams | None = None) -> StageRequest:
        return StageRequest(
            request_id=request_id,
            prompt_token_ids=self.expected.prompt_token_ids,
            mm_metadata=self.mm_metadata(),
            options={} if self.speaker is None else {"speaker": self.speaker},
            sampling_params=params,
        )

    def thinker_output(self, config: PretrainedConfig) -> StageOutput:
        return StageOutput(
            request_id="0",
            stage_id=0,
            prompt_token_ids=self.expected.prompt_token_ids,
            completions=[Completion(token_ids=self.expected.thinker_token_ids)],
            tensors={TALKER_INPUT: self.thinker_rows(config)},
        )

    def talker_input(self, config: PretrainedConfig) -> StageInput:
        made = self.to_talker(config).process(self.stage_request(), {0: self.thinker_output(config)})
        assert made is not None
        return made


@dataclass(frozen=True)
class OmniModel:
    """
    Attributes:
        architecture: With which the names of the stages' architectures begin.
        vocoder: The vocoder's architecture, and its field of the configuration.
        speakers: Of the cases, in turn.
    """

    checkpoint: Path
    architecture: str
    vocoder: tuple[str, str]
    to_vocoder: type[StageInputProcessor]
    case: type[OmniCase]
    speakers: tuple[str | None, ...] = (None,)

    def start_talker(self, **changes: Any) -> OmniLLMEngine:
        arguments = {
            "model_arch": f"{self.architecture}TalkerForConditionalGeneration",
            "hf_config_name": "talker_config",
            "engine_output_type": "codes",
            "enable_prompt_embeds": True,
            **TIGHT,
        }
        return start_engine(self.checkpoint, **arguments | changes)


def loaded_model(engine: OmniLLMEngine) -> Any:
    """The model that an engine of this process runs."""
    return engine._core.model_executor.driver_worker.worker.model_runner.get_model()  # type: ignore[attr-defined]


def as_prompt(stage_input: StageInput) -> dict[str, Any]:
    return {
        "prompt_token_ids": stage_input.prompt_token_ids,
        "additional_information": stage_input.additional_information,
    }


# -- fixtures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def config(omni: OmniModel) -> PretrainedConfig:
    return AutoConfig.from_pretrained(omni.checkpoint)


@pytest.fixture(scope="session")
def oracle(omni: OmniModel) -> HFOracle:
    return HFOracle(omni.checkpoint, num_threads=1)


@pytest.fixture(scope="session")
def cases(omni: OmniModel, oracle: HFOracle) -> dict[str, OmniCase]:
    """One case of each kind of prompt, a second one of each (`text2`, ...), and harder ones; the voices in turn."""
    prompts = make_prompts(omni.checkpoint, PROMPT_KINDS)
    prompts |= {f"{kind}2": prompt for kind, prompt in make_prompts(omni.checkpoint, PROMPT_KINDS, seed=7).items()}
    prompts |= make_prompts(omni.checkpoint, HARD_KINDS, seed=3)
    made = {}
    for i, (name, prompt) in enumerate(prompts.items()):
        speaker = omni.speakers[i % len(omni.speakers)]
        expected = oracle.generate(
            prompt, thinker_max_tokens=THINKER_TOKENS, talker_max_tokens=TALKER_TOKENS, speaker=speaker
        )
        made[name] = omni.case(prompt, hf_inputs(oracle.processor, prompt), expected, speaker)
    return made


@pytest.fixture(scope="session")
def spoken(cases: dict[str, OmniCase]) -> dict[str, OmniCase]:
    """The cases with a reply of several tokens, which has speech."""
    spoken = {name: case for name, case in cases.items() if len(case.expected.thinker_token_ids) > 1}
    assert len(spoken) >= 8
    return spoken


@pytest.fixture(scope="session")
def thinker_engine(omni: OmniModel) -> Iterator[OmniLLMEngine]:
    engine = start_engine(
        omni.checkpoint,
        model_arch=f"{omni.architecture}ThinkerForConditionalGeneration",
        engine_output_type="latent",
        enable_prefix_caching=True,  # as a pipeline has it
        limit_mm_per_prompt={"image": 2, "audio": 2, "video": 1},
        skip_mm_profiling=True,
        mm_processor_cache_gb=0,  # as a pipeline has it
        **TIGHT,
    )
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def talker_engine(omni: OmniModel) -> Iterator[OmniLLMEngine]:
    engine = omni.start_talker()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def vocoder_engine(omni: OmniModel) -> Iterator[OmniLLMEngine]:
    architecture, field = omni.vocoder
    engine = start_engine(
        omni.checkpoint,
        engine_type="generation",
        model_arch=architecture,
        hf_config_name=field,
        engine_output_type="audio",
        max_model_len=512,
    )
    yield engine
    engine.close()


@pytest.fixture
def talker_prompts(spoken: dict[str, OmniCase], config: PretrainedConfig) -> dict[str, Any]:
    return {name: as_prompt(case.talker_input(config)) for name, case in spoken.items()}


@pytest.fixture
def make_params(spoken: dict[str, OmniCase], config: PretrainedConfig) -> MakeParams:
    """A talker's parameters, greedy but for changes, with the ids that end its speech."""
    ends = spoken["text"].talker_input(config).stop_token_ids
    return partial(lambda **changes: SamplingParams(**TALKER | changes), stop_token_ids=ends)


# -- tests ------------------------------------------------------------------------------------------------------------


class ThinkerTests:
    """The thinker's text and the rows that it emits for the talker, against HF's states."""

    tolerance: float
    """Of rows, relative to the largest value: states of random weights are as large as 30."""

    def check(self, output: Any, case: OmniCase, config: PretrainedConfig) -> None:
        assert output.prompt_token_ids == case.expected.prompt_token_ids
        assert list(output.outputs[0].token_ids) == case.expected.thinker_token_ids
        rows = output.multimodal_output[TALKER_INPUT]
        expected = case.thinker_rows(config)
        assert rows.shape == expected.shape
        torch.testing.assert_close(rows, expected, rtol=0, atol=self.tolerance * float(expected.abs().max()))

    @pytest.mark.parametrize("kind", [*PROMPT_KINDS, *HARD_KINDS])
    def test_a_prompt_alone(
        self, kind: str, thinker_engine: OmniLLMEngine, cases: dict[str, OmniCase], config: PretrainedConfig
    ) -> None:
        outputs = run_engine(thinker_engine, {kind: cases[kind].prompt}, THINKER)
        self.check(outputs[kind], cases[kind], config)

    @pytest.mark.parametrize("kind", [*PROMPT_KINDS, *HARD_KINDS])
    def test_a_prompt_that_is_found_in_the_cache(
        self, kind: str, thinker_engine: OmniLLMEngine, cases: dict[str, OmniCase], config: PretrainedConfig
    ) -> None:
        """Media that look like others' are told apart: `kind` and `kind2` have the same tokens before their
        questions."""
        for name in (kind, f"{kind}2", kind):
            if name in cases:
                output = run_engine(thinker_engine, {name: cases[name].prompt}, THINKER)[name]
                self.check(output, cases[name], config)
        block_size = thinker_engine.vllm_config.cache_config.block_size
        assert output.num_cached_tokens >= (len(output.prompt_token_ids) - 1) // block_size * block_size > 0

    def test_all_at_once_with_chunks_and_preemptions(
        self,
        thinker_engine: OmniLLMEngine,
        cases: dict[str, OmniCase],
        config: PretrainedConfig,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        preemptions = PreemptionCounter(thinker_engine, monkeypatch)
        outputs = run_engine(thinker_engine, {name: case.prompt for name, case in cases.items()}, THINKER)
        assert preemptions.count > 0
        for name, case in cases.items():
            self.check(outputs[name], case, config)


class TalkerTests:
    """The talker's codes against HF's, greedy and sampled."""

    def test_requests_alone(
        self,
        talker_engine: OmniLLMEngine,
        spoken: dict[str, OmniCase],
        talker_prompts: dict[str, Any],
        make_params: MakeParams,
    ) -> None:
        for name, case in spoken.items():
            case.check_speech(run_engine(talker_engine, {name: talker_prompts[name]}, make_params())[name])

    def test_all_at_once_with_chunks_and_preemptions(
        self,
        talker_engine: OmniLLMEngine,
        spoken: dict[str, OmniCase],
        talker_prompts: dict[str, Any],
        make_params: MakeParams,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        preemptions = PreemptionCounter(talker_engine, monkeypatch)
        outputs = run_engine(talker_engine, talker_prompts, make_params())
        assert preemptions.count > 0
        for name, case in spoken.items():
            case.check_speech(outputs[name])

    def test_a_seed_fixes_every_code_whatever_else_runs(
        self,
        talker_engine: OmniLLMEngine,
        spoken: dict[str, OmniCase],
        talker_prompts: dict[str, Any],
        make_params: MakeParams,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        prompt = talker_prompts.pop("text")
        alone = run_engine(talker_engine, {"alone": prompt}, make_params(seed=7, **SAMPLED))["alone"]
        preemptions = PreemptionCounter(talker_engine, monkeypatch)
        params = dict.fromkeys(talker_prompts, make_params()) | {
            "again": make_params(seed=7, **SAMPLED),
            "other": make_params(seed=8, **SAMPLED),
        }
        outputs = run_engine(talker_engine, {**talker_prompts, "again": prompt, "other": prompt}, params)
        assert preemptions.count > 0
        assert self.speech_of(outputs["again"]) == self.speech_of(alone)
        assert self.speech_of(outputs["other"]) != self.speech_of(alone)
        for name in talker_prompts:  # greedy requests are not touched by sampled ones
            spoken[name].check_speech(outputs[name])

    def test_text_stop_ids_of_the_checkpoint_do_not_stop_a_talker(
        self, talker_engine: OmniLLMEngine, talker_prompts: dict[str, Any], make_params: MakeParams
    ) -> None:
        params = make_params()
        request = talker_engine.input_processor.process_inputs("0", talker_prompts["text"], params)
        assert request.sampling_params is not None
        assert request.sampling_params.all_stop_token_ids == set(params.stop_token_ids or ())

    @staticmethod
    def speech_of(output: Any) -> list[Any]:
        codes = output.multimodal_output.get("codes")
        return list(output.outputs[0].token_ids) if codes is None else codes.tolist()


class PipelineTests:
    """The stages one after the other in this process, on windows."""

    @pytest.fixture(scope="class")
    def thoughts(self, thinker_engine: OmniLLMEngine, cases: dict[str, OmniCase]) -> Pieces:
        return run_first_stage(thinker_engine, {name: case.prompt for name, case in cases.items()}, THINKER)

    def test_codes_do_not_depend_on_when_text_arrives(
        self,
        omni: OmniModel,
        thoughts: Pieces,
        talker_engine: OmniLLMEngine,
        cases: dict[str, OmniCase],
        config: PretrainedConfig,
    ) -> None:
        sizes = WindowConfig(window_size=1, first_window_size=2, window_growth=2)
        frames = speak(omni, talker_engine, cases, config, thoughts, sizes, seed=1)
        for name, case in cases.items():
            whole = merge_stage_outputs(frames[name])
            tokens = [token for completion in whole.completions for token in completion.token_ids]
            assert tokens == case.expected.talker_token_ids, name
            if "codes" in whole.tensors:
                assert torch.equal(whole.tensors["codes"], case.expected.codes.T), name

    def test_prompts_of_every_kind_and_every_voice_through_three_stages(
        self,
        omni: OmniModel,
        thoughts: Pieces,
        talker_engine: OmniLLMEngine,
        vocoder_engine: OmniLLMEngine,
        cases: dict[str, OmniCase],
        config: PretrainedConfig,
    ) -> None:
        sizes = WindowConfig(window_size=16, first_window_size=2, window_growth=2)
        frames = speak(omni, talker_engine, cases, config, thoughts, sizes)
        requests = with_params(cases, SamplingParams(max_tokens=1, seed=0, detokenize=False))
        to_vocoder = omni.to_vocoder(config)
        waves = run_stage(vocoder_engine, GenerationRequest, to_vocoder, requests, frames, WindowConfig())
        for name, case in cases.items():
            wave = merge_stage_outputs(waves[name]).tensors["audio"]
            torch.testing.assert_close(
                wave, case.expected.audio, rtol=0, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
            )


def speak(
    omni: OmniModel,
    engine: OmniLLMEngine,
    cases: dict[str, OmniCase],
    config: PretrainedConfig,
    thoughts: Pieces,
    window: WindowConfig,
    seed: int = 0,
) -> Pieces:
    """What a talker makes of a thinker's output in these windows."""
    requests = with_params(cases, SamplingParams(**TALKER))
    return run_stage(engine, ARRequest, omni.case.to_talker(config), requests, thoughts, window, seed)


def with_params(cases: dict[str, OmniCase], params: SamplingParams) -> dict[str, StageRequest]:
    return {name: case.stage_request(name, params) for name, case in cases.items()}
