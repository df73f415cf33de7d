# SPDX-License-Identifier: Apache-2.0
"""The entry of an architecture in vLLM's registry."""

import importlib.util
from pathlib import Path

from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelInfo
from vllm.platforms import current_platform


class LazyModel(_LazyRegisteredModel):
    """Imports a model to find out what it can do, where vLLM starts a process that does it.

    vLLM's keeps CUDA uninitialized in this process. Where there is none, it only takes longer: ten seconds for each
    architecture at its first use on a machine. What was found out is kept in vLLM's cache, as by vLLM.
    """

    def inspect_model_cls(self) -> _ModelInfo:
        spec = importlib.util.find_spec(self.module_name) if current_platform.is_cpu() else None
        if spec is None or spec.origin is None:
            return super().inspect_model_cls()
        module_hash = self._get_modelinfo_module_hash(Path(spec.origin))
        info = self._load_modelinfo_from_cache(module_hash)
        if info is None:
            info = _ModelInfo.from_model_cls(self.load_model_cls())
            self._save_modelinfo_to_cache(info, module_hash)
        return info
