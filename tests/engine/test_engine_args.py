# SPDX-License-Identifier: Apache-2.0
"""What a stage's engine arguments become, without an engine."""

import logging
import os
import pickle
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from vllm import ModelRegistry, SamplingParams, envs
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from tests.engine import feedback_models, hooked_models
from vllm_omni.engine import engine_args, input_processor
from vllm_omni.engine.argument_values import check_values
from vllm_omni.engine.engine_args import OmniEngineSettings, create_config_for_inputs, create_engine_args
from vllm_omni.engine.input_processor import OmniInputProcessor
from vllm_omni.errors import StageConfigError
from vllm_omni.model_packages import InstalledModels, ModelPackage
from vllm_omni.stage.engines.base import Outbox
from vllm_omni.stage.engines.llm import LLMStageEngine


@pytest.fixture
def overlap(monkeypatch):
    """As on a GPU: on a CPU vLLM turns asynchronous scheduling off."""
    monkeypatch.setattr(type(current_platform), "check_and_update_config", classmethod(lambda cls, config: None))


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"dtpye": "float32"}, "'dtpye'; did you mean 'dtype'"),
            ({"max_modellen": 3}, "did you mean 'max_model_len'"),
            ({"temperature": 0.5}, "unknown engine argument 'temperature'; it belongs to default_sampling_params"),
            ({"gpu_mem": 0.5}, r"unknown engine argument 'gpu_mem'$"),
            ({"engine_type": "diffusion"}, "'diffusion' is not one of ar, generation"),
            ({"engine_type": "generation", "async_scheduling": True}, "only autoregressive stages"),
            ({"row_cache_bytes": -1}, "row_cache_bytes: Expected `int` >= 0, not -1"),
            ({"hf_config_name": 3}, "hf_config_name: Expected `str | null`, got `int` 3"),
            ({"model_arch": ["A"]}, "model_arch: Expected `str | null`, got `array`"),
            ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization: nan must be"),
            ({"gpu_memory_utilization": 7}, "gpu_memory_utilization: 7 must be less than or equal to 1"),
            ({"max_num_seqs": True}, "max_num_seqs: True must be a valid integer"),
            ({"enforce_eager": "yes"}, "enforce_eager: 'yes' must be a valid boolean"),
            ({"hf_overrides": [1]}, r"hf_overrides: \[1\] must be a valid dictionary or must be callable"),
            ({"mamba_cache_dtype": "fp5"}, "mamba_cache_dtype: 'fp5' must be 'auto', "),
            ({"swa_bounded_replay": 3}, "swa_bounded_replay: 3 must be a valid boolean"),
            ({"limit_mm_per_prompt": {"image": "many"}}, "limit_mm_per_prompt: 'many' must be a valid integer.* or"),
            ({"compilation_config": {"mode": "best"}}, "compilation_config.mode: 'best' is wrong: Invalid.*NONE"),
            ({"tokenizer_mode": "sloww"}, "tokenizer_mode: 'sloww' is not one of auto, "),
            ({"engine_output_type": "latent", "speculative_config": {"method": "ngram"}}, "rejected tokens"),
            (
                {"engine_output_type": "latent", "kv_transfer_config": {"kv_role": "kv_both"}},
                "kv_transfer_config needs",
            ),
        ],
    )
    def test_arguments(self, arguments, message):
        with pytest.raises(StageConfigError, match=message):
            create_engine_args("model", **arguments)

    def test_an_unknown_part_of_the_configuration(self, tiny_qwen3_omni_moe):
        arguments = create_engine_args(str(tiny_qwen3_omni_moe), hf_config_name="talker")
        with pytest.raises(ValueError, match=r"Qwen3OmniMoeConfig has no 'talker'; it has .*'talker_config'"):
            arguments.create_engine_config()


def test_the_default_of_each_argument_is_no_error(tiny_qwen3):
    """Whatever type vLLM gives it."""
    check_values(vars(EngineArgs(str(tiny_qwen3))))


class TestAsyncScheduling:
    @pytest.fixture(autouse=True)
    def passed(self, monkeypatch):
        """As with a vLLM with which texts have passed on a GPU."""
        monkeypatch.setattr(engine_args, "PASSED_ON_GPU", {"async_text"})

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ({}, None),
            ({"async_scheduling": True}, True),
            ({"engine_output_type": "latent"}, False),
            ({"engine_output_type": "latent", "async_scheduling": True}, True),
            ({"engine_type": "generation"}, False),
            ({"skip_tokenizer_init": True, "generation_config": "vllm"}, False),
            ({"tensor_parallel_size": 2}, False),
            ({"speculative_config": {"method": "ngram"}}, False),
            ({"scheduler_cls": "my.Scheduler"}, False),
        ],
    )
    def test_vllm_decides_of_a_text(self, tiny_qwen3, arguments, expected):
        assert create_engine_args(str(tiny_qwen3), **arguments).async_scheduling is expected

    def test_a_text_that_has_not_passed_is_scheduled_step_by_step(self, tiny_qwen3, monkeypatch):
        monkeypatch.setattr(engine_args, "PASSED_ON_GPU", {"async_rows"})
        assert create_engine_args(str(tiny_qwen3)).async_scheduling is False
        assert create_engine_args(str(tiny_qwen3), async_scheduling=True).async_scheduling is True

    def test_vllm_decides_of_rows_where_they_have_passed(self, tiny_qwen3, monkeypatch):
        monkeypatch.setattr(engine_args, "PASSED_ON_GPU", {"async_rows"})
        assert create_engine_args(str(tiny_qwen3), engine_output_type="latent").async_scheduling is None

    @pytest.mark.parametrize(("model_arch", "expected"), [(None, True), ("HookedQwen3", False), ("EchoQwen3", False)])
    def test_not_where_a_step_needs_the_last_one(self, tiny_qwen3, overlap, monkeypatch, model_arch, expected):
        monkeypatch.setattr(engine_args, "PASSED_ON_GPU", {"async_rows"})
        hooked_models.register()
        feedback_models.register()
        arguments = {"engine_output_type": "latent", "model_arch": model_arch}
        config = create_engine_args(str(tiny_qwen3), **arguments).create_engine_config()
        assert config.scheduler_config.async_scheduling is expected
        assert (config.scheduler_config.scheduler_cls == engine_args._ASYNC_SCHEDULER) is expected
        asked = create_engine_args(str(tiny_qwen3), async_scheduling=True, **arguments)
        if expected:
            assert asked.create_engine_config().scheduler_config.async_scheduling
        else:
            with pytest.raises(StageConfigError, match=f"the next step of {model_arch} needs the last one; remove it"):
                asked.create_engine_config()

    def test_never_on_a_cpu(self, tiny_qwen3):
        config = create_engine_args(str(tiny_qwen3)).create_engine_config().scheduler_config
        assert config.async_scheduling is False and config.scheduler_cls == engine_args._SCHEDULERS["ar"]


class TestPartOfACheckpoint:
    @pytest.fixture
    def config(self, tiny_qwen3_omni_moe):
        return create_engine_args(
            str(tiny_qwen3_omni_moe),
            hf_config_name="talker_config",
            model_arch="Qwen3ForCausalLM",
            engine_output_type="codes",
            model_stage="talker",
            hf_overrides={"own_field": 3, "text_config": {"rms_norm_eps": 0.5}},
        ).create_engine_config()

    def test_the_part_is_the_models_configuration(self, config):
        model = config.model_config
        assert model.architectures == ["Qwen3ForCausalLM"]
        assert type(model.hf_config).__name__ == "Qwen3OmniMoeTalkerConfig"
        assert model.hf_config.dtype is torch.float32  # set only in the whole configuration

    def test_the_part_has_the_whole_configuration(self, config):
        whole = config.model_config.hf_config.omni_parent_config
        assert whole["model_type"] == "qwen3_omni_moe" and "thinker_config" in whole
        assert whole["architectures"] == ["Qwen3OmniMoeForConditionalGeneration"]

    def test_users_overrides_go_to_the_part(self, config):
        hf_config = config.model_config.hf_config
        assert hf_config.own_field == 3 and hf_config.text_config.rms_norm_eps == 0.5

    def test_the_language_models_tokenizer_and_defaults_are_not_used(self, config):
        assert config.model_config.skip_tokenizer_init
        assert config.model_config.get_diff_sampling_param() == {}
        request = OmniInputProcessor(config).process_inputs("0", {"prompt_token_ids": [1]}, SamplingParams())
        assert request.sampling_params.all_stop_token_ids == set()

    def test_settings_are_readable_from_the_configuration(self, config):
        travelled = pickle.loads(pickle.dumps(config))
        assert OmniEngineSettings.from_vllm_config(travelled) == OmniEngineSettings("ar", "codes", "talker", False)

    def test_json(self, config):
        assert '"omni_parent_config"' in config.model_config.hf_config.to_json_string()


class TestDefaults:
    def test_explicit_arguments_win(self, tiny_qwen3):
        given = {"worker_cls": "my.Worker", "scheduler_cls": "my.Scheduler", "enforce_eager": False}
        arguments = create_engine_args(str(tiny_qwen3), kv_cache_memory_bytes=5, skip_tokenizer_init=True, **given)
        assert {name: getattr(arguments, name) for name in given} == given
        assert (arguments.kv_cache_memory_bytes, arguments.skip_tokenizer_init) == (5, True)

    def test_a_text_model_is_compiled_as_in_vllm_and_one_that_emits_rows_is_not(self, tiny_qwen3):
        plain = EngineArgs(str(tiny_qwen3)).enforce_eager
        assert create_engine_args(str(tiny_qwen3)).enforce_eager is plain is False
        assert create_engine_args(str(tiny_qwen3), engine_output_type="latent").enforce_eager is True

    def test_additional_config_is_added_to(self, tiny_qwen3):
        arguments = create_engine_args(str(tiny_qwen3), additional_config={"mine": 1})
        assert arguments.additional_config["mine"] == 1 and "omni" in arguments.additional_config

    def test_prefixes_are_cached_where_there_are_keys_and_values(self, tiny_qwen3, caplog, monkeypatch):
        monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

        def is_on(**arguments):
            return create_engine_args(str(tiny_qwen3), model_stage="a", **arguments).enable_prefix_caching

        assert is_on() is None and is_on(engine_output_type="latent") is False
        assert is_on(enable_prefix_caching=True) is True
        assert is_on(enable_prefix_caching=True, engine_output_type="latent") is True
        assert is_on(enable_prefix_caching=True, engine_output_type="codes", enable_prompt_embeds=True) is True
        assert caplog.text == ""
        assert is_on(enable_prefix_caching=True, engine_type="generation") is False
        assert "stage a runs without enable_prefix_caching: it keeps no keys and values" in caplog.text

    def test_configurations_may_be_dicts(self, tiny_qwen3):
        """As in a stage configuration; vLLM itself makes objects of some of them only."""
        for field in fields(EngineArgs):
            classes = tuple(kind for kind in get_args(field.type) or (field.type,) if is_dataclass(kind))
            if classes and field.name != "weight_transfer_config":  # Which is refused.
                arguments = create_engine_args(str(tiny_qwen3), **{field.name: {}})
                assert isinstance(getattr(arguments, field.name), classes), field.name

    def test_a_reasoning_parser_with_settings_of_structured_outputs(self, tiny_qwen3):
        given = {"backend": "xgrammar"}
        arguments = create_engine_args(str(tiny_qwen3), reasoning_parser="qwen3", structured_outputs_config=given)
        config = create_config_for_inputs(arguments).structured_outputs_config
        assert (config.backend, config.reasoning_parser) == ("xgrammar", "qwen3")
        assert given == {"backend": "xgrammar"}

    def test_a_callable_override(self, tiny_qwen3):
        def deeper(config):
            config.num_hidden_layers = 7
            return config

        arguments = create_engine_args(str(tiny_qwen3), hf_overrides=deeper)
        assert arguments.create_engine_config().model_config.hf_config.num_hidden_layers == 7

    def test_several_devices_keep_vllms_executor(self, tiny_qwen3):
        assert create_engine_args(str(tiny_qwen3), tensor_parallel_size=2).distributed_executor_backend is None
        assert "UniProc" in create_engine_args(str(tiny_qwen3)).distributed_executor_backend

    @pytest.mark.parametrize("engine_type", ["ar", "generation"])
    def test_workers_exist_on_both_platforms(self, engine_type):
        from vllm.utils.import_utils import resolve_obj_by_qualname

        gpu, cpu = (resolve_obj_by_qualname(engine_args._WORKERS[engine_type, is_cpu]) for is_cpu in (False, True))
        assert issubclass(cpu, gpu) and issubclass(cpu.omni_runner_cls, gpu.omni_runner_cls)


class TestModelRunner:
    """Ours extend vLLM's V1. Stages of text take vLLM's V2 where it is chosen."""

    VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch):
        envs.disable_envs_cache()  # vLLM caches the environment from an engine's start on; earlier tests start some.
        monkeypatch.setattr(engine_args, "current_platform", SimpleNamespace(is_cpu=lambda: False))
        monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
        monkeypatch.setenv(self.VARIABLE, "")  # Restored afterwards.
        monkeypatch.delenv(self.VARIABLE)

    def test_the_callers_environment_does_not_change(self, tiny_qwen3, monkeypatch):
        by_vllm = ("LOCAL_WORLD_SIZE", "NUMEXPR_MAX_THREADS", "VLLM_WORKER_MULTIPROC_METHOD")
        for name in by_vllm:
            monkeypatch.setenv(name, "")  # Restored afterwards.
            monkeypatch.delenv(name)
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "7")
        arguments = create_engine_args(str(tiny_qwen3))
        before = dict(os.environ)
        create_config_for_inputs(arguments)
        LLMStageEngine(Outbox(), 0, str(tiny_qwen3), "ar", {})
        assert os.environ == before
        arguments.create_engine_config()
        assert all(name in os.environ for name in by_vllm), "or else this shows nothing"

    @pytest.mark.slow
    def test_a_model_that_cannot_be_imported_is_named(self, tiny_qwen3, monkeypatch):
        path = "no_such_package.model:Broken"
        models = InstalledModels({"p": ModelPackage(architectures={"BrokenModel": path})}, {})
        monkeypatch.setattr(engine_args, "find_models", lambda: models)
        monkeypatch.setitem(ModelRegistry.models, "BrokenModel", None)  # Removed afterwards.
        ModelRegistry.register_model("BrokenModel", path)
        arguments = create_engine_args(str(tiny_qwen3), model_arch="BrokenModel", model_stage="first")
        with pytest.raises(StageConfigError) as error:
            create_config_for_inputs(arguments)
        assert str(error.value).startswith(f"stage first (its model is {path}): Model architectures ['BrokenModel']")

    def use_v2(self, model, **arguments):
        return create_engine_args(str(model), **arguments).create_engine_config().use_v2_model_runner

    @pytest.fixture
    def chosen(self, monkeypatch):
        monkeypatch.setenv(self.VARIABLE, "1")

    def test_text_takes_v2_where_it_is_chosen(self, tiny_qwen3, overlap, chosen):
        assert self.use_v2(tiny_qwen3)

    def test_the_default_is_what_has_passed(self, tiny_qwen3, overlap, monkeypatch):
        monkeypatch.setattr(engine_args, "PASSED_ON_GPU", {"async_text"})
        assert not self.use_v2(tiny_qwen3)
        monkeypatch.setattr(engine_args, "PASSED_ON_GPU", {"v2_model_runner"})
        assert self.use_v2(tiny_qwen3)
        monkeypatch.setenv(self.VARIABLE, "0")
        assert not self.use_v2(tiny_qwen3)

    def test_text_with_marks_takes_v2(self, tiny_qwen3, overlap, monkeypatch):
        """vLLM's V1 would leave them out without a word."""
        monkeypatch.setattr(engine_args, "PASSED_ON_GPU", frozenset())
        marks = {"watermark_config": {"key": 7}}
        assert self.use_v2(tiny_qwen3, **marks)
        for arguments in ({"async_scheduling": False}, {"engine_output_type": "latent"}):
            with pytest.raises(StageConfigError, match="watermark_config: only vLLM's V2 model runner marks text"):
                self.use_v2(tiny_qwen3, **marks, **arguments)

    def test_it_brings_its_schedule(self, tiny_qwen3, overlap, chosen, monkeypatch):
        """It has no other, whatever has passed."""
        monkeypatch.setattr(engine_args, "PASSED_ON_GPU", frozenset())
        assert self.use_v2(tiny_qwen3)

    def test_what_vllm_would_not_take_it_for(self, tiny_qwen3, overlap, chosen, monkeypatch):
        monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", False)
        assert not self.use_v2(tiny_qwen3)

    @pytest.mark.parametrize(
        "arguments",
        [
            {"engine_output_type": "latent"},
            {"engine_type": "generation"},
            {"async_scheduling": False},
            {"logits_processors": ["tests.engine.test_engine_args:Anything"]},
            {"tensor_parallel_size": 2, "async_scheduling": True},
        ],
        ids=lambda arguments: next(iter(arguments)),
    )
    def test_others_take_v1(self, tiny_qwen3, overlap, chosen, arguments):
        assert not self.use_v2(tiny_qwen3, **arguments)

    def test_a_model_of_a_package_takes_v1(self, tiny_qwen3, overlap, chosen, monkeypatch):
        """It may have hooks."""
        models = InstalledModels({"p": ModelPackage(architectures={"Qwen3ForCausalLM": "p:Hooked"})}, {})
        monkeypatch.setattr(engine_args, "find_models", lambda: models)
        assert not self.use_v2(tiny_qwen3)

    def test_inputs_are_processed_for_v1(self, tiny_qwen3, overlap, chosen):
        arguments = create_engine_args(str(tiny_qwen3), async_scheduling=False)
        processor = OmniInputProcessor(create_config_for_inputs(arguments))
        params = SamplingParams(max_tokens=1, prompt_logprobs=1, prompt_logprob_token_ids=[[1]])
        with pytest.raises(ValueError, match="requires the V2 model runner"):
            processor.process_inputs("0", {"prompt_token_ids": [1, 2]}, params)
        positions = {"mrope_positions": torch.arange(3).expand(3, 3)}
        allowed = SamplingParams(allowed_token_ids=[1] * 1025)
        processor.process_inputs("0", {"prompt_token_ids": [1, 2, 3], "additional_information": positions}, allowed)

    @pytest.fixture
    def v2(self, tiny_qwen3, overlap, chosen):
        return OmniInputProcessor(create_config_for_inputs(create_engine_args(str(tiny_qwen3))))

    def test_inputs_are_processed_for_v2(self, v2):
        params = SamplingParams(max_tokens=1, prompt_logprobs=1, prompt_logprob_token_ids=[[1]])
        v2.process_inputs("0", {"prompt_token_ids": [1, 2]}, params)

    @pytest.mark.parametrize(
        ("message", "params"),
        [
            ("allowed_token_ids: at most 1024 tokens, not 1025", {"allowed_token_ids": [1] * 1025}),
            ("logit_bias: at most 2 tokens, not 3", {"logit_bias": dict.fromkeys([1, 2, 3], 1.0)}),
            ("stop_token_ids with min_tokens: at most 128", {"stop_token_ids": [*range(129)], "min_tokens": 1}),
            ("bad_words: at most 1024 tokens", {"bad_words": ["a" * 600, "b" * 600]}),
        ],
        ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
    )
    def test_what_would_raise_in_a_step_is_refused(self, v2, message, params, monkeypatch):
        monkeypatch.setattr(input_processor, "MAX_NUM_LOGIT_BIAS_TOKENS", 2)  # The vocabulary has fewer than 1,024.
        with pytest.raises(ValueError, match=f"{message}.*async_scheduling is false"):
            v2.process_inputs("0", {"prompt_token_ids": [1]}, SamplingParams(**params))

    def test_positions_are_refused(self, v2):
        positions = {"mrope_positions": torch.arange(3).expand(3, 3)}
        with pytest.raises(ValueError, match="mrope_positions need"):
            v2.process_inputs(
                "0", {"prompt_token_ids": [1, 2, 3], "additional_information": positions}, SamplingParams()
            )
