# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point: vLLM calls `register` in every process that it starts.

It adds our architectures to vLLM's registry and changes nothing else: plain vLLM is not affected.
"""

import logging

from vllm_omni.errors import VllmRequirementError
from vllm_omni.model_executor.registry import OMNI_MODELS
from vllm_omni.vllm_requirement import require_vllm

logger = logging.getLogger(__name__)


def register() -> None:
    """Adds our architectures to vLLM, by name; no model is imported. Safe to call any number of times.

    An unsupported vLLM is left unchanged, with a warning: it may run without us.
    """
    try:
        require_vllm()
    except VllmRequirementError as error:
        logger.warning("vllm_omni adds no models to this vLLM. %s", error)
        return
    from vllm import ModelRegistry

    known = ModelRegistry.get_supported_archs()
    for architecture, path in OMNI_MODELS.items():
        if architecture not in known:  # registered by an earlier call, or by vLLM, whose models are not replaced
            ModelRegistry.register_model(architecture, path)
