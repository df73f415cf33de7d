# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point: vLLM calls `register` in every process that it starts.

It adds the architectures of all packages with models to vLLM's registry, their configurations to transformers', and
changes nothing else: no model or configuration of theirs is replaced.
"""

import logging
import pkgutil
from collections.abc import Mapping

from vllm_omni.errors import VllmRequirementError
from vllm_omni.model_packages import find_models
from vllm_omni.vllm_requirement import require_vllm

logger = logging.getLogger(__name__)


def register() -> None:
    """Adds all architectures to vLLM, by name; no model is imported. Safe to call any number of times.

    An unsupported vLLM is left unchanged, with a warning: it may run without us. So are packages that are broken.
    """
    try:
        require_vllm()
    except VllmRequirementError as error:
        logger.warning("vllm_omni adds no models to this vLLM. %s", error)
        return
    models = find_models()
    for package, reason in models.broken.items():
        logger.warning("vllm_omni leaves out the models of %s: %s", package, reason)
    _register_architectures(models.architectures)
    _register_configs(models.hf_configs)


def _register_architectures(paths: Mapping[str, str]) -> None:
    from vllm import ModelRegistry

    from vllm_omni.model_executor.lazy_model import LazyModel

    for architecture, path in paths.items():
        known = ModelRegistry.models.get(architecture)
        module, _, name = path.partition(":")
        if known is None:
            ModelRegistry.models[architecture] = LazyModel(module, name)
        elif vars(known) != {"module_name": module, "class_name": name}:  # else registered by an earlier call
            logger.warning("%s is not used: vLLM has a model %s, which is not replaced", path, architecture)


def _register_configs(paths: Mapping[str, str]) -> None:
    from transformers import CONFIG_MAPPING, AutoConfig

    for model_type, path in paths.items():
        if model_type not in CONFIG_MAPPING:  # It has those of earlier calls too.
            try:
                AutoConfig.register(model_type, pkgutil.resolve_name(path))
            except (Exception, SystemExit) as error:  # Code of another package: it must not stop vLLM.
                logger.warning("vllm_omni leaves out %s, the configuration of %s: %s", path, model_type, error)
