# SPDX-License-Identifier: Apache-2.0
"""The stages that a checkpoint runs as, and their arguments. Starts nothing, loads no weights, touches no device."""

import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from huggingface_hub import snapshot_download
from transformers import PretrainedConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_omni.config.dit_config import DIT_SETTINGS, parse_dit_config
from vllm_omni.config.loader import load_pipeline_config
from vllm_omni.config.omni_args import OmniArgs
from vllm_omni.config.overrides import merge, overridden_keys, override_stage, with_engine_type
from vllm_omni.config.resources import check_resources
from vllm_omni.config.stage_config import OmniStageConfig, PipelineConfig, find_stage
from vllm_omni.config.utils import find_stage_configs, is_shipped, nearest
from vllm_omni.diffusion.pipeline_info import is_diffusers_model, load_model_index
from vllm_omni.engine.hf_override import load_hf_config
from vllm_omni.engine.hub import check_on_hub
from vllm_omni.engine.stage_args import LENGTH, VLLM_ARGUMENTS
from vllm_omni.engine.text_models import is_of_vllm, why_not_text
from vllm_omni.errors import StageConfigError
from vllm_omni.model_executor.speech_model import find_speech_class, find_speech_input
from vllm_omni.model_executor.transcription_model import find_transcription_class, is_transcription_checkpoint
from vllm_omni.model_packages import find_models
from vllm_omni.placement.budgets import apply_budgets

CHECKPOINT_STAGE_CONFIG = "stage_config.yaml"
"""In a checkpoint's folder: the configuration of that checkpoint, in place of the one for its architecture."""
# Arguments that may be folders of the pipeline's checkpoint.
_CHECKPOINT_ARGS = ("model", "tokenizer")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
# Arguments that the pipeline itself reads.
_FOR_ALL = {"otlp_traces_endpoint", "trust_remote_code"}


@dataclass(frozen=True)
class ReadPipeline:
    """A pipeline's configuration for any machine, after each step of its resolution.

    Attributes:
        source: The stage configuration file; None for a model of diffusers, or one of transformers that speaks or
            transcribes, whose only stage needs none.
        loaded: The content of the file.
        with_arguments: The same with the caller's arguments.
        with_checkpoints: The same with the stages' own checkpoints resolved, and no `max_model_len` above theirs.
    """

    source: Path | None
    loaded: PipelineConfig
    with_arguments: PipelineConfig
    with_checkpoints: PipelineConfig


@dataclass(frozen=True)
class ResolvedPipeline(ReadPipeline):
    """A pipeline's configuration for this machine.

    Attributes:
        config: The same with budgets converted to engine arguments: what runs.
        engine_args: Of the vLLM stages, in stage order.
    """

    config: PipelineConfig
    engine_args: list[EngineArgs]


def resolve_pipeline(args: OmniArgs) -> ResolvedPipeline:
    """Finds a checkpoint's stage configuration, applies arguments, and checks the arguments of all engines.

    Raises:
        StageConfigError: There is no such checkpoint, or the configuration or an argument is wrong, or does not fit
            this machine's devices.
    """
    read = read_pipeline(args)
    config = read.with_checkpoints
    if config.runtime.distributed_backend is None:
        config = apply_budgets(config)  # Else each stage does it on its machine.
    return ResolvedPipeline(**vars(read), config=config, engine_args=_check_engine_args(config, args.model))


def read_pipeline(args: OmniArgs) -> ReadPipeline:
    """Resolves a pipeline for any machine: independent of this machine's devices.

    Raises:
        StageConfigError: There is no such checkpoint, or the configuration or an argument is wrong.
    """
    source = _source(args)
    loaded = _single_stage(args) if source is None else _load(source, args)
    with_arguments = apply_arguments(
        loaded.with_runtime(**args.runtime_overrides), args.engine_args, args.stage_overrides
    )
    with_checkpoints = _limit_lengths(resolve_checkpoints(with_arguments, args.model), source, args)
    return ReadPipeline(source, loaded, with_arguments, with_checkpoints)


def has_vllm_stages(args: OmniArgs) -> bool:
    """Whether any stage of a checkpoint's pipeline is a vLLM engine. Raises as `read_pipeline`."""
    source = _source(args)
    return source is not None and any(stage.kind.params == "sampling" for stage in _load(source, args).stage_args)


def _load(source: Path, args: OmniArgs) -> PipelineConfig:
    """A stage configuration. The caller trusts those of packages and of `stage_configs_path`; that of the checkpoint
    with `trust_remote_code`."""
    folder = Path(args.model)
    is_own = args.stage_configs_path is None and source == folder / CHECKPOINT_STAGE_CONFIG
    trusts = not is_own or is_shipped(folder) or args.engine_args.get("trust_remote_code")
    config = load_pipeline_config(source, None if trusts else folder)
    conditional = [stage for stage in config.stage_args if stage.only_if is not None]
    if not conditional:
        return config
    hf_config = _read_hf_config(args.model, args.engine_args)
    return config.without(s.stage_id for s in conditional if not getattr(hf_config, cast(str, s.only_if), True))


def _source(args: OmniArgs) -> Path | None:
    """The stage configuration of a checkpoint; None for one that is the only stage."""
    if args.stage_configs_path is not None:
        return find_stage_configs(args.stage_configs_path)
    model = args.model
    if not Path(model).exists() and (not model or _is_path(model)):
        raise StageConfigError(
            f"{model!r} is no checkpoint: there is no such folder, and it is no name on the Hugging Face hub "
            "(NAME or ORGANIZATION/NAME)"
        )
    own = Path(model) / CHECKPOINT_STAGE_CONFIG
    if own.is_file():
        return own
    revision = args.engine_args.get("revision")
    check_on_hub(model, revision, args.engine_args.get("hf_token"))
    if is_diffusers_model(model, revision):
        name = args.engine_args.get("pipeline_class") or load_model_index(model, revision)["_class_name"]
        return find_models().pipelines.get(str(name))
    return _source_by_model_type(model, args.engine_args)


def _source_by_model_type(model: str, engine_args: Mapping[str, Any]) -> Path | None:
    """The configuration of a model that a package has, or that of text models if vLLM serves it as one; None for a
    model of transformers that speaks or transcribes."""
    models = find_models()
    try:
        hf_config = _read_hf_config(model, engine_args)
    except StageConfigError:
        # vLLM does not read all configurations of transformers.
        if find_speech_input(model, engine_args) or is_transcription_checkpoint(model, engine_args):
            return None
        raise
    if hf_config.model_type in models.stage_configs:
        return models.stage_configs[hf_config.model_type]
    is_of_transformers = any(find(hf_config) for find in (find_speech_class, find_transcription_class))
    if is_of_transformers and not is_of_vllm(hf_config):
        return None
    for_vllm = {name: value for name, value in engine_args.items() if name in VLLM_ARGUMENTS}
    reason = why_not_text(model, hf_config, for_vllm)
    if reason is not None:
        raise StageConfigError(
            f"{model}: no package has a stage configuration for model_type {hf_config.model_type!r} (architecture "
            f"{', '.join(hf_config.architectures or ['not given'])}), it is no text model: {reason}, and "
            "transformers has no class of this name that makes sound of a text or a sound, or text of a sound\n"
            f"{models.describe()}"
        )
    return models.stage_configs["text"]


def _read_hf_config(model: str, engine_args: Mapping[str, Any]) -> PretrainedConfig:
    """
    Raises:
        StageConfigError: It cannot be read: transformers raises errors of all types for values that it does not expect.
    """
    try:
        return load_hf_config(model, engine_args)
    except Exception as error:
        problem = "; ".join(str(error).strip().split("\n")[:2]) or type(error).__name__
        if isinstance(error, AttributeError | TypeError | KeyError):
            problem += "; it must be the object that `save_pretrained` writes"
        # There is one, of an unknown model.
        hint = f"\n{find_models().describe()}" if isinstance(error, ValueError) else ""
        raise StageConfigError(f"{model}: the checkpoint's config.json cannot be read: {problem}{hint}") from error


def _is_path(name: str) -> bool:
    """Whether it cannot be a name on the Hugging Face hub."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def _single_stage(args: OmniArgs) -> PipelineConfig:
    """A diffusers pipeline, or a model of transformers that speaks or transcribes, as the only stage; two stages of one
    that does both, each for requests that name it or give it what it reads."""
    if is_diffusers_model(args.model, args.engine_args.get("revision")):
        return PipelineConfig(stage_args=[_diffusion_stage(args)])
    stages = []
    if is_transcription_checkpoint(args.model, args.engine_args):
        stages.append(_transformers_stage(0, "asr", "audio", "text"))
    speech_input = find_speech_input(args.model, args.engine_args)
    if speech_input is not None or not stages:
        stages.append(_transformers_stage(len(stages), "speech", speech_input or "text", "audio"))
    return PipelineConfig(stage_args=stages)


def _transformers_stage(
    stage_id: int, name: str, accepts: Literal["text", "audio"], output_type: str
) -> OmniStageConfig:
    return OmniStageConfig(
        stage_id=stage_id,
        engine_type="transformers",
        engine_args={"model_stage": name},
        accepts=accepts,
        final_output=True,
        final_output_type=output_type,
    )


def _diffusion_stage(args: OmniArgs) -> OmniStageConfig:
    """The output type follows from the pipeline's class."""
    from vllm_omni.diffusion.modular_info import read_pipeline_info  # imports diffusers

    settings = {name: value for name, value in args.engine_args.items() if name in DIT_SETTINGS}
    info = read_pipeline_info(args.model, parse_dit_config(settings, args.model))
    return OmniStageConfig(
        stage_id=0,
        engine_type="DiT",
        engine_args={"model_stage": "diffusion"},
        final_output=True,
        final_output_type=info.output_type,
    )


def apply_arguments(
    config: PipelineConfig, engine_args: Mapping[str, Any], overrides: Mapping[str | int, Mapping[str, Any]]
) -> PipelineConfig:
    """Gives every stage the `engine_args` that its engine has, and its own `overrides`.

    Args:
        overrides: By stage name or id; see `config.overrides`.

    Raises:
        StageConfigError: No stage has an argument, or an override is wrong or for an unknown stage.
    """
    by_stage = _overrides_by_stage(config, overrides)
    config = config.with_stage_args([with_engine_type(stage, by_stage[stage.stage_id]) for stage in config.stage_args])
    known = _FOR_ALL.union(*(stage.kind.known_arguments() for stage in config.stage_args))
    for name in engine_args:
        if name not in known:
            raise StageConfigError(f"no stage of this pipeline has an engine argument {name!r}{nearest(name, known)}")
    placed = [override_stage(s, {"runtime": by_stage[s.stage_id].get("runtime", {})}) for s in config.stage_args]
    check_resources(config.with_stage_args(placed))
    stages = []
    for stage in config.stage_args:
        known = set(stage.kind.known_arguments())
        if stage.stage_id not in config.adapter_stages:
            known.discard("lora_modules")
        shared = {name: value for name, value in engine_args.items() if name in known}
        stage = msgspec.structs.replace(stage, engine_args=stage.engine_args | shared)
        stages.append(override_stage(stage, by_stage[stage.stage_id]))
    return config.with_stage_args(stages)


def _overrides_by_stage(
    config: PipelineConfig, overrides: Mapping[str | int, Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
    by_stage: dict[int, dict[str, Any]] = {stage_id: {} for stage_id in config.stages}
    for key, values in overrides.items():
        stage_id = find_stage(config, key).stage_id
        if not isinstance(values, Mapping):
            raise StageConfigError(f"override for stage {key}: {values!r} is not a mapping of keys to values")
        by_stage[stage_id] = merge(by_stage[stage_id], values)
    return by_stage


def resolve_checkpoints(config: PipelineConfig, model: str) -> PipelineConfig:
    """Replaces every stage's own `engine_args.model` and `engine_args.tokenizer` by an absolute path or a name on the
    hub, and adds what follows from a checkpoint.

    Of a pipeline on the hub the folders are downloaded, and checkpoints that a package makes
    (`ModelPackage.made_checkpoints`) are made, without weights, which `fetch_weights` adds.

    Raises:
        StageConfigError: It is a path that does not exist.
    """
    stages = []
    for stage in config.stage_args:
        args = stage.engine_args
        own = {name: args[name] for name in _CHECKPOINT_ARGS if args.get(name) is not None}
        found = {
            name: _resolve_checkpoint(value, model, args.get("revision"), f"{stage.label}: engine_args.{name}")
            for name, value in own.items()
        }
        stages.append(msgspec.structs.replace(stage, engine_args=args | found).kind.with_checkpoint(model))
    return config.with_stage_args(stages)


def _limit_lengths(config: PipelineConfig, source: Path | None, args: OmniArgs) -> PipelineConfig:
    """Reduces each `max_model_len` to what the stage's checkpoint has, unless the operator set it.

    Raises:
        StageConfigError: The operator's is longer.
    """
    names_file = args.stage_configs_path is not None and source not in find_models().stage_configs.values()
    is_for_all = names_file or LENGTH in args.engine_args
    overridden = {
        find_stage(config, key).stage_id
        for key, override in args.stage_overrides.items()
        if ("engine_args", LENGTH) in overridden_keys(override)
    }
    stages = []
    for stage in config.stage_args:
        given = stage.engine_args.get(LENGTH)
        longest = stage.kind.longest_length(args.model) if isinstance(given, int) else None
        if longest is not None:
            if is_for_all or stage.stage_id in overridden:
                raise StageConfigError(
                    f"{stage.label}: {LENGTH} {given} is more than its checkpoint has; set at most {longest}, for "
                    f"this stage alone with --stage.{stage.name}.{LENGTH}"
                )
            stage = msgspec.structs.replace(stage, engine_args=stage.engine_args | {LENGTH: longest})
        stages.append(stage)
    return config.with_stage_args(stages)


def _resolve_checkpoint(own: Any, model: str, revision: str | None, where: str) -> str:
    """A directory in the pipeline's checkpoint, the name of one that a package makes, a path, or a name on the hub, in
    this order."""
    if not isinstance(own, str) or not own:
        raise StageConfigError(f"{where}: {own!r} is no checkpoint; write a path or a name on the hub")
    if (made := _made_checkpoint(own, model)) is not None:
        return str(made(with_weights=False))
    for path in (Path(model) / own, Path(os.path.expanduser(own)), _hub_folder(model, own, revision, _WEIGHTS)):
        if path is not None and path.exists():
            return str(path.resolve())
    if _is_path(own):
        raise StageConfigError(
            f"{where}: there is no {own!r}, neither in {model!r} nor as a path; write a path or a name on the hub"
        )
    return own


def _made_checkpoint(own: str, model: str) -> Callable[..., Path] | None:
    """The function that makes the checkpoint of that name, which no folder of the pipeline's checkpoint has."""
    made = find_models().made_checkpoints.get(own)
    return None if made is None or (Path(model) / own).exists() else pkgutil.resolve_name(made)


def _hub_folder(model: str, folder: str, revision: str | None, without: Sequence[str] = ()) -> Path | None:
    """A folder of a checkpoint on the hub, downloaded; None if there is none.

    Args:
        without: Patterns of files that are not downloaded.
    """
    if Path(model).exists() or _is_path(model) or "/" in folder:  # With a slash it is a name on the hub.
        return None
    try:
        root = snapshot_download(
            model, revision=revision, allow_patterns=f"{folder}/*", ignore_patterns=[f"{folder}/{p}" for p in without]
        )
    except (OSError, ValueError):  # Not on the hub, or not to be reached: whoever reads it reports that.
        return None
    return Path(root) / folder


def fetch_weights(read: ReadPipeline, model: str) -> None:
    """Downloads those of stages whose checkpoint is a folder of one on the hub, which an engine takes for a local one,
    and makes those that packages make, once on a machine."""
    for given, found in zip(read.with_arguments.stage_args, read.with_checkpoints.stage_args, strict=True):
        own = given.engine_args.get("model")
        if own is None or found.engine_args["model"] == own:
            continue
        if (made := _made_checkpoint(own, model)) is not None:
            made(with_weights=True)
        else:
            _hub_folder(model, own, given.engine_args.get("revision"))


def _check_engine_args(config: PipelineConfig, model: str) -> list[EngineArgs]:
    """The engine arguments of all vLLM stages; wrong arguments of any stage are refused before one is started."""
    checked = []
    for stage in config.stage_args:
        where = stage.label
        if stage.kind.has_ray_workers and config.runtime.distributed_backend is None:
            raise StageConfigError(
                f"{where}: distributed_executor_backend: ray needs the nodes of a Ray cluster; set distributed_backend "
                "to ray, too"
            )
        checked.append(stage.kind.check_arguments(model))
        if config.runtime.distributed_backend is None:
            stage.kind.check_machine()
    return [engine_args for engine_args in checked if engine_args is not None]
