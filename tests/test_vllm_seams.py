# SPDX-License-Identifier: Apache-2.0
"""Signatures of vLLM that our engine layer overrides or calls: an incompatible vLLM fails here, not at run time.

To move to another vLLM: read what changed at each seam that fails, adapt the class named there, then this table.
"""

import importlib
import inspect
from dataclasses import fields, is_dataclass

import pytest
import vllm

TESTED_VERSION = "0.32.0"

ENGINE = "vllm_omni.engine"
WORKER = "vllm_omni.worker"
SCHED = "vllm_omni.core.sched"
QWEN3_OMNI = "vllm_omni.model_executor.models.qwen3_omni_moe"
DEPTH_LAYERS = "vllm_omni.model_executor.layers.depth_decoder_layers"
TALKER = "OmniQwen3OmniMoeTalker"

# Seam in vLLM -> (its parameters, the class of ours that overrides or calls it). "=..." stands for any default.
SIGNATURES = {
    # Scheduler
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": (
        "self, throttle_prefills=...",
        f"{SCHED}.omni_ar_scheduler:OmniARScheduler",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._handle_blocked_waiting_request": (
        "self, request",
        f"{SCHED}.omni_scheduler_mixin:OmniSchedulerMixin",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._get_local_prefix_cache_hit": (
        "self, request",
        f"{SCHED}.omni_ar_scheduler:OmniARScheduler",
    ),
    "vllm.model_executor.models.registry:_LazyRegisteredModel.inspect_model_cls": (
        "self",
        "vllm_omni.model_executor.lazy_model:LazyModel",
    ),
    "vllm.model_executor.models.registry:_LazyRegisteredModel._load_modelinfo_from_cache": (
        "self, module_hash",
        "vllm_omni.model_executor.lazy_model:LazyModel",
    ),
    "vllm.model_executor.models.registry:_LazyRegisteredModel._save_modelinfo_to_cache": (
        "self, mi, module_hash",
        "vllm_omni.model_executor.lazy_model:LazyModel",
    ),
    "vllm.model_executor.models.registry:_ModelInfo.from_model_cls": (
        "model",
        "vllm_omni.model_executor.lazy_model:LazyModel",
    ),
    "vllm.v1.core.kv_cache_utils:get_request_block_hasher": (
        "hash_block_size, caching_hash_fn",
        f"{SCHED}.row_hashes:RowHasher",
    ),
    "vllm.v1.request:Request.update_block_hashes": ("self", f"{SCHED}.output:OmniRequest"),
    "vllm.v1.core.encoder_cache_manager:EncoderCacheManager.__init__": (
        "self, cache_size",
        f"{SCHED}.encoder_cache:CountingEncoderCacheManager",
    ),
    "vllm.v1.core.encoder_cache_manager:EncoderCacheManager.create_manager": (
        "*, cache_size, vllm_config",
        f"{SCHED}.encoder_cache:CountingEncoderCacheManager",
    ),
    "vllm.v1.core.encoder_cache_manager:EncoderCacheManager.check_and_update_cache": (
        "self, request, input_id",
        f"{SCHED}.encoder_cache:CountingEncoderCacheManager",
    ),
    "vllm.v1.core.encoder_cache_manager:EncoderCacheManager.allocate": (
        "self, request, input_id",
        f"{SCHED}.encoder_cache:CountingEncoderCacheManager",
    ),
    "vllm.multimodal.processing.processor:BaseMultiModalProcessor._get_mm_hashes": (
        "self, inputs",
        "vllm_omni.model_executor.models.qwen_omni.processor:PairsSoundWithVideo",
    ),
    "vllm.multimodal.processing.processor:BaseMultiModalProcessor._cached_apply_hf_processor": (
        "self, inputs, timing_ctx",
        "vllm_omni.model_executor.models.qwen_omni.processor:PairsSoundWithVideo",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": (
        "self, request, timestamp, drop_stale_output=...",
        f"{SCHED}.omni_scheduler_mixin:OmniSchedulerMixin",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.make_stats": (
        "self, spec_decoding_stats=..., kv_connector_stats=..., cudagraph_stats=..., perf_stats=..., "
        "ec_connector_stats=...",
        f"{SCHED}.guided_scheduler:GuidedScheduler",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict": (
        "self, hidden_states, num_scheduled_tokens",
        f"{WORKER}.gpu_model_runner:OmniGPUModelRunner",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample": (
        "self, logits, spec_decode_metadata",
        f"{WORKER}.gpu_model_runner:OmniGPUModelRunner",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._update_request_with_output": (
        "self, request, new_token_ids, is_stale=...",
        f"{SCHED}.omni_ar_scheduler:OmniARScheduler",
    ),
    "vllm.multimodal.audio:resample_audio_pyav": (
        "audio, *, orig_sr, target_sr",
        "vllm_omni.model_executor.prompt_processor:PromptProcessor",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.has_finished_requests": (
        "self",
        f"{SCHED}.omni_scheduler_mixin:OmniSchedulerMixin",
    ),
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": ("self", f"{ENGINE}.omni_llm_engine:OmniLLMEngine"),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": (
        "self, scheduler_output, model_runner_output",
        f"{SCHED}.omni_generation_scheduler:OmniGenerationScheduler",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.add_request": (
        "self, request",
        f"{SCHED}.omni_generation_scheduler:OmniGenerationScheduler",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": (
        "self, request_ids, finished_status",
        f"{SCHED}.omni_generation_scheduler:OmniGenerationScheduler",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache": (
        "self, reset_running_requests=..., reset_connector=...",
        f"{ENGINE}.omni_engine_core:OmniEngineCore",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.__init__": (
        "self, vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size=..., "
        "mm_registry=..., include_finished_set=..., log_stats=...",
        f"{SCHED}.omni_generation_scheduler:OmniGenerationScheduler",
    ),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_request_with_output": (
        "self, request, new_token_ids, is_stale=...",
        f"{SCHED}.omni_ar_scheduler:OmniAsyncARScheduler",
    ),
    # Grammars
    "vllm.v1.structured_output:StructuredOutputManager.grammar_init": (
        "self, request",
        f"{ENGINE}.grammars:OmniStructuredOutputManager",
    ),
    "vllm.v1.structured_output:StructuredOutputManager._create_grammar": (
        "self, request",
        f"{ENGINE}.grammars:OmniStructuredOutputManager",
    ),
    "vllm.v1.structured_output.backend_types:StructuredOutputGrammar.accept_tokens": (
        "self, request_id, tokens",
        f"{ENGINE}.grammars:ForcedTokens",
    ),
    "vllm.v1.structured_output.backend_types:StructuredOutputGrammar.validate_tokens": (
        "self, tokens",
        f"{ENGINE}.grammars:ForcedTokens",
    ),
    "vllm.v1.structured_output.backend_types:StructuredOutputGrammar.rollback": (
        "self, num_tokens",
        f"{ENGINE}.grammars:ForcedTokens",
    ),
    "vllm.v1.structured_output.backend_types:StructuredOutputGrammar.fill_bitmask": (
        "self, bitmask, batch_index",
        f"{ENGINE}.grammars:ForcedTokens",
    ),
    "vllm.v1.structured_output.backend_types:StructuredOutputGrammar.is_terminated": (
        "self",
        f"{ENGINE}.grammars:ForcedTokens",
    ),
    "vllm.v1.structured_output.backend_types:StructuredOutputGrammar.reset": (
        "self",
        f"{ENGINE}.grammars:ForcedTokens",
    ),
    # Engine core
    "vllm.v1.engine.core:EngineCore.preprocess_add_request": (
        "self, request",
        f"{ENGINE}.omni_engine_core:OmniEngineCore",
    ),
    "vllm.v1.engine.core:EngineCore.step_with_batch_queue": ("self", f"{ENGINE}.omni_engine_core:OmniEngineCore"),
    "vllm.v1.engine.core:EngineCore.shutdown": ("self", f"{ENGINE}.omni_engine_core:OmniEngineCore"),
    "vllm.v1.engine.core:EngineCore.collective_rpc": (
        "self, method, timeout=..., args=..., kwargs=...",
        f"{ENGINE}.omni_engine_core:OmniEngineCore",
    ),
    "vllm.v1.engine.core:EngineCore.reset_encoder_cache": ("self", f"{ENGINE}.omni_engine_core:OmniEngineCore"),
    "vllm.v1.engine.core_client:InprocClient.add_request": (
        "self, request",
        f"{ENGINE}.omni_engine_core:OmniEngineCore",
    ),
    "vllm.v1.engine.core_client:InprocClient.shutdown": (
        "self, timeout=...",
        f"{ENGINE}.omni_llm_engine:OmniLLMEngine",
    ),
    # Engine
    "vllm.v1.engine.llm_engine:LLMEngine.__init__": (
        "self, vllm_config, executor_class, log_stats, aggregate_engine_logging=..., usage_context=..., "
        "stat_loggers=..., mm_registry=..., multiprocess_mode=...",
        f"{ENGINE}.omni_llm_engine:OmniLLMEngine",
    ),
    "vllm.v1.engine.llm_engine:LLMEngine.add_request": (
        "self, request_id, prompt, params, arrival_time=..., lora_request=..., tokenization_kwargs=..., "
        "trace_headers=..., priority=..., session_id=..., prompt_text=..., kv_hints=...",
        f"{ENGINE}.omni_llm_engine:OmniLLMEngine",
    ),
    "vllm.v1.metrics.loggers:PrometheusStatLogger.__init__": (
        "self, vllm_config, engine_indexes=...",
        f"{ENGINE}.engine_metrics:EngineMetrics",
    ),
    "vllm.v1.engine.llm_engine:LLMEngine.step": ("self", f"{ENGINE}.omni_llm_engine:OmniLLMEngine"),
    "vllm.v1.engine.llm_engine:LLMEngine.abort_request": (
        "self, request_ids, internal=...",
        f"{ENGINE}.omni_llm_engine:OmniLLMEngine",
    ),
    "vllm.engine.arg_utils:EngineArgs.create_model_config": (
        "self",
        f"{ENGINE}.engine_args:StageEngineArgs",
    ),
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": (
        "self, usage_context=..., headless=...",
        f"{ENGINE}.engine_args:StageEngineArgs",
    ),
    "vllm.v1.executor:Executor.get_class": ("vllm_config", f"{ENGINE}.omni_llm_engine:OmniLLMEngine"),
    # Inputs
    "vllm.v1.engine.input_processor:InputProcessor.__init__": (
        "self, vllm_config, renderer=..., *, mm_registry=...",
        f"{ENGINE}.input_processor:OmniInputProcessor",
    ),
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs": (
        "self, request_id, prompt, params, supported_tasks, arrival_time=..., lora_request=..., "
        "tokenization_kwargs=..., trace_headers=..., priority=..., data_parallel_rank=..., resumable=..., "
        "session_id=..., kv_hints=...",
        f"{ENGINE}.input_processor:OmniInputProcessor",
    ),
    "vllm.renderers:BaseRenderer.render_cmpl": (
        "self, prompts, tok_params=..., *, prompt_extras=..., skip_mm_cache=...",
        f"{ENGINE}.input_processor:OmniInputProcessor",
    ),
    "vllm.renderers:BaseRenderer.shutdown": ("self", f"{ENGINE}.omni_llm_engine:OmniLLMEngine"),
    "vllm.renderers.inputs.preprocess:parse_model_prompt": (
        "model_config, prompt",
        f"{ENGINE}.input_processor:OmniInputProcessor",
    ),
    # Outputs
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.create_chat_completion": (
        "self, request, raw_request=...",
        "vllm_omni.entrypoints.openai.chat:OmniServingChat",
    ),
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator": (
        "self, request, result_generator, request_id, model_name, conversation, tokenizer, request_metadata, "
        "parser=..., mm_token_counts=...",
        "vllm_omni.entrypoints.openai.chat:OmniServingChat",
    ),
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_stream_generator": (
        "self, request, result_generator, request_id, model_name, conversation, tokenizer, request_metadata, "
        "chat_template_kwargs=..., mm_token_counts=...",
        "vllm_omni.entrypoints.openai.chat:OmniServingChat",
    ),
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat._engine_reasoning_kwargs": (
        "self, request, parser, chat_template_kwargs, prompt_token_ids",
        "vllm_omni.entrypoints.openai.chat:OmniServingChat",
    ),
    "vllm.parser.abstract_parser:Parser.parse_delta": (
        "self, delta_text, delta_token_ids, request, prompt_token_ids=..., *, finished",
        "vllm_omni.stage.spoken_reply:SpokenReply",
    ),
    "vllm.v1.engine.output_processor:OutputProcessor.__init__": (
        "self, tokenizer, *, log_stats, stream_interval=..., tracing_enabled=..., admission_stats=...",
        f"{ENGINE}.output_processor:MultimodalOutputProcessor",
    ),
    "vllm.v1.engine.output_processor:OutputProcessor.add_request": (
        "self, request, prompt, parent_req=..., request_index=..., queue=...",
        f"{ENGINE}.output_processor:MultimodalOutputProcessor",
    ),
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs": (
        "self, engine_core_outputs, engine_core_timestamp=..., iteration_stats=..., weight_version=...",
        f"{ENGINE}.output_processor:MultimodalOutputProcessor",
    ),
    "vllm.v1.engine.output_processor:RequestState._new_completion_output": (
        "self, token_ids, finish_reason, stop_reason",
        f"{ENGINE}.output_processor:OmniRequestState",
    ),
    "vllm.v1.engine.output_processor:RequestState._new_request_output": (
        "self, external_req_id, outputs, finished, kv_transfer_params=..., ec_transfer_params=..., error=...",
        f"{ENGINE}.output_processor:OmniRequestState",
    ),
    # Workers
    "vllm.v1.worker.gpu_worker:Worker._make_model_runner": ("self", f"{WORKER}.gpu_worker:OmniGPUWorker"),
    "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model": (
        "self",
        f"{WORKER}.gpu_worker:GPUGenerationWorker",
    ),
    "vllm.v1.worker.cpu_worker:CPUWorker.init_device": ("self", f"{WORKER}.cpu_worker:OmniCPUWorker"),
    "vllm.v1.worker.gpu_worker:Worker.init_device": ("self", f"{WORKER}.gpu_worker:GPUGenerationWorker"),
    "vllm.v1.worker.gpu_worker:Worker.execute_model": ("self, scheduler_output", f"{WORKER}.gpu_worker:OmniGPUWorker"),
    "vllm.v1.worker.gpu_worker:Worker.sample_tokens": ("self, grammar_output", f"{WORKER}.gpu_worker:OmniGPUWorker"),
    "vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model": (
        "self",
        f"{WORKER}.gpu_worker:GPUGenerationWorker",
    ),
    # Model runners
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.__init__": (
        "self, vllm_config, device",
        f"{WORKER}.gpu_model_runner:OmniGPUModelRunner",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.load_model": (
        "self, load_dummy_weights=..., *, model=...",
        f"{WORKER}.gpu_model_runner:OmniGPUModelRunner",
    ),
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model": (
        "self, load_dummy_weights=..., *args, model=..., **kwargs",
        f"{WORKER}.gpu_text_model_runner:GPUTextModelRunner",
    ),
    "vllm.v1.worker.gpu.states:RequestState.apply_staged_writes": (
        "self",
        f"{WORKER}.gpu_text_model_runner:GPUTextModelRunner",
    ),
    "vllm.v1.worker.gpu.model_states.interface:ModelState.apply_staged_writes": (
        "self",
        f"{WORKER}.gpu_text_model_runner:GPUTextModelRunner",
    ),
    "vllm.v1.worker.gpu.block_table:BlockTables.apply_staged_writes": (
        "self",
        f"{WORKER}.gpu_text_model_runner:GPUTextModelRunner",
    ),
    "vllm.v1.worker.gpu.sample.sampler:Sampler.apply_staged_writes": (
        "self",
        f"{WORKER}.gpu_text_model_runner:GPUTextModelRunner",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states": (
        "self, scheduler_output",
        f"{WORKER}.gpu_model_runner:OmniGPUModelRunner",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._init_mrope_positions": (
        "self, req_state",
        f"{WORKER}.gpu_model_runner:OmniGPUModelRunner",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._calc_mrope_positions": (
        "self, scheduler_output",
        f"{WORKER}.gpu_model_runner:OmniGPUModelRunner",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._preprocess": (
        "self, scheduler_output, num_input_tokens, intermediate_tensors=...",
        f"{WORKER}.gpu_model_runner:OmniGPUModelRunner",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward": (
        "self, input_ids=..., positions=..., intermediate_tensors=..., inputs_embeds=..., **model_kwargs",
        f"{WORKER}.gpu_model_runner:OmniGPUModelRunner",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": (
        "self, scheduler_output, intermediate_tensors=...",
        f"{WORKER}.gpu_generation_model_runner:GPUGenerationModelRunner",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens": (
        "self, grammar_output",
        f"{WORKER}.gpu_ar_model_runner:GPUARModelRunner",
    ),
    "vllm.model_executor.model_loader.utils:get_model_cls": (
        "model_config",
        f"{WORKER}.gpu_worker:GPUARWorker",
    ),
    "vllm.utils.torch_utils:async_tensor_h2d": (
        "data, device=..., dtype=..., out=...",
        f"{WORKER}.feedback_ar_model_runner:FeedbackARModelRunner",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_kv_cache_spec": (
        "self",
        f"{WORKER}.gpu_generation_model_runner:GPUGenerationModelRunner",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.profile_run": (
        "self, randomize_inputs=...",
        f"{WORKER}.gpu_generation_model_runner:GPUGenerationModelRunner",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_run": (
        "self, num_tokens, cudagraph_runtime_mode=..., force_attention=..., uniform_decode=..., "
        "allow_microbatching=..., skip_eplb=..., is_profile=..., create_mixed_batch=..., remove_lora=..., "
        "is_graph_capturing=..., num_active_loras=..., profile_seq_lens=..., randomize_inputs=...",
        f"{WORKER}.gpu_generation_model_runner:GPUGenerationModelRunner",
    ),
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner.__init__": (
        "self, vllm_config, device",
        f"{WORKER}.cpu_worker:CPUARModelRunner",
    ),
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model": (
        "self, load_dummy_weights=...",
        f"{WORKER}.cpu_worker:CPUARModelRunner",
    ),
    "vllm.forward_context:set_forward_context": (
        "attn_metadata, vllm_config, num_tokens=..., num_tokens_across_dp=..., cudagraph_runtime_mode=..., "
        "batch_descriptor=..., ubatch_slices=..., slot_mapping=..., skip_compiled=..., is_padding=...",
        f"{WORKER}.gpu_generation_model_runner:GPUGenerationModelRunner",
    ),
    "vllm.model_executor.models.interfaces:SupportsEagle3.set_aux_hidden_state_layers": (
        "self, layers",
        f"{WORKER}.gpu_ar_model_runner:GPUARModelRunner",
    ),
    # Models
    "vllm.config:VllmConfig.with_hf_config": ("self, hf_config, architectures=...", f"{QWEN3_OMNI}.talker:{TALKER}"),
    "vllm.model_executor.models.qwen3_moe:Qwen3MoeModel.forward": (
        "self, input_ids, positions, intermediate_tensors=..., inputs_embeds=...",
        f"{QWEN3_OMNI}.talker:{TALKER}",
    ),
    "vllm.model_executor.models.interfaces:SupportsMRoPE.get_mrope_input_positions": (
        "self, input_tokens, mm_features",
        f"{QWEN3_OMNI}.talker:{TALKER}",
    ),
    "vllm.model_executor.model_loader.weight_utils:filter_safetensors_files_by_weight_name": (
        "hf_weights_files, is_unused_weight",
        f"{QWEN3_OMNI}.code2wav:OmniQwen3OmniMoeCode2Wav",
    ),
    "vllm.model_executor.models.qwen3_omni_moe_thinker:Qwen3OmniMoeThinkerForConditionalGeneration.__init__": (
        "self, *, vllm_config, prefix=...",
        f"{QWEN3_OMNI}.thinker:OmniQwen3OmniMoeThinker",
    ),
    "vllm.model_executor.models.qwen3_omni_moe_thinker:Qwen3OmniMoeThinkerForConditionalGeneration.embed_input_ids": (
        "self, input_ids, multimodal_embeddings=..., *, is_multimodal=...",
        f"{QWEN3_OMNI}.thinker:OmniQwen3OmniMoeThinker",
    ),
    "vllm._custom_ops:rms_norm": ("out, input, weight, epsilon", f"{DEPTH_LAYERS}:LayerKernels"),
    "vllm._custom_ops:fused_add_rms_norm": ("input, residual, weight, epsilon", f"{DEPTH_LAYERS}:LayerKernels"),
    "vllm._custom_ops:rotary_embedding": (
        "positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset=..., inverse=...",
        f"{DEPTH_LAYERS}:LayerKernels",
    ),
    "vllm._custom_ops:create_onednn_mm": ("weight, primitive_cache_size=...", f"{DEPTH_LAYERS}:LayerKernels"),
    "vllm._custom_ops:onednn_mm": ("dnnl_handler, x, bias", f"{DEPTH_LAYERS}:LayerKernels"),
}

# Structure in vLLM -> (fields that we read, write or must keep, the class of ours).
FIELDS = {
    "vllm.v1.structured_output.request:StructuredOutputRequest": (
        "params _grammar reasoning_ended",
        f"{ENGINE}.grammars:OmniStructuredOutputManager",
    ),
    "vllm.v1.engine:EngineCoreRequest": (
        "request_id prompt_token_ids mm_features sampling_params prompt_embeds prompt_is_token_ids external_req_id",
        "vllm_omni.payloads:OmniEngineCoreRequest",
    ),
    "vllm.v1.engine:EngineCoreOutput": (
        "request_id new_token_ids pooling_output finish_reason events",
        f"{ENGINE}.output_processor:MultimodalOutputProcessor",
    ),
    "vllm.v1.core.sched.output:NewRequestData": ("req_id", f"{SCHED}.output:OmniNewRequestData"),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "scheduled_new_reqs num_scheduled_tokens total_num_scheduled_tokens finished_req_ids",
        f"{WORKER}.gpu_model_runner:OmniGPUModelRunner",
    ),
    "vllm.v1.outputs:ModelRunnerOutput": (
        "req_ids req_id_to_index sampled_token_ids pooler_output",
        f"{SCHED}.output:OmniModelRunnerOutput",
    ),
    "vllm.v1.worker.gpu_model_runner:ExecuteModelState": (
        "hidden_states sample_hidden_states aux_hidden_states",
        f"{WORKER}.gpu_ar_model_runner:GPUARModelRunner",
    ),
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": (
        "prompt_token_ids sampling_params mrope_positions mrope_position_delta",
        f"{WORKER}.gpu_model_runner:OmniGPUModelRunner",
    ),
}

OURS = sorted({dependent for _, dependent in [*SIGNATURES.values(), *FIELDS.values()]})


def resolve(path):
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def parameters_of(function):
    shown, keyword_only = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            shown.append("*")
            keyword_only = True
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        keyword_only = keyword_only or prefix == "*"
        shown.append(prefix + parameter.name + ("" if parameter.default is parameter.empty else "=..."))
    return ", ".join(shown)


def field_names(structure):
    if is_dataclass(structure):
        return {field.name for field in fields(structure)}
    return set(getattr(structure, "__struct_fields__", None) or structure._fields)


@pytest.mark.parametrize("seam", SIGNATURES)
def test_signature(seam):
    expected, ours = SIGNATURES[seam]
    try:
        found = parameters_of(resolve(seam))
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{seam} is gone in vLLM {vllm.__version__} ({error}). {ours} depends on it.")
    if found != expected:
        pytest.fail(
            f"{seam} is ({found}) in vLLM {vllm.__version__}, and was ({expected}) in {TESTED_VERSION}. "
            f"{ours} depends on it."
        )


@pytest.mark.parametrize("structure", FIELDS)
def test_fields(structure):
    expected, ours = FIELDS[structure]
    missing = set(expected.split()) - field_names(resolve(structure))
    if missing:
        pytest.fail(f"{structure} has lost {sorted(missing)} in vLLM {vllm.__version__}. {ours} depends on it.")


def is_vllms(owner):
    return owner.__module__.partition(".")[0] == "vllm"


@pytest.mark.parametrize("path", OURS)
def test_every_override_is_pinned_and_takes_vllms_arguments(path):
    ours = resolve(path)
    for name, override in overrides(ours):
        base = next(base for base in ours.__mro__[1:] if is_vllms(base) and name in vars(base))
        seam = f"{base.__module__}:{base.__qualname__}.{name}"
        assert seam in SIGNATURES, f"{path} overrides {seam}, which is not pinned here"
        taken = parameters_of(override).replace("=...", "")
        if "*args" not in taken and "**kwargs" not in taken:
            assert taken == SIGNATURES[seam][0].replace("=...", ""), f"{path}.{name}"


def overrides(ours):
    """Methods in the source of our class that a class of vLLM has too; not those of `@dataclass` or `Protocol`."""
    of_vllm = [vars(base) for base in ours.__mro__[1:] if is_vllms(base)]
    for name, member in vars(ours).items():
        is_written = inspect.isfunction(member) and not (is_dataclass(ours) and name.startswith("__"))
        if is_written and any(name in members and not is_typings(members[name]) for members in of_vllm):
            yield name, member


def is_typings(member):
    return getattr(member, "__module__", None) == "typing"
