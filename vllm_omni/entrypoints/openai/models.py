# SPDX-License-Identifier: Apache-2.0
"""/v1/models of a pipeline without a vLLM stage: vLLM's own reads a context length that such a model does not have."""

from collections.abc import Sequence
from http import HTTPStatus

from vllm.entrypoints.openai.models.protocol import BaseModelPath, LoRAModulePath
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, ModelCard, ModelList, ModelPermission
from vllm.lora.request import LoRARequest

from vllm_omni.errors import StageConfigError


class DiffusionModels:
    """Stands where vLLM's routes look for `OpenAIServingModels`."""

    def __init__(self, base_model_paths: list[BaseModelPath], lora_modules: Sequence[LoRAModulePath] = ()) -> None:
        """
        Raises:
            StageConfigError: Two of the models and adapters have one name.
        """
        self.base_model_paths = base_model_paths
        self.lora_requests: dict[str, LoRARequest] = {}
        for number, module in enumerate(lora_modules, start=1):
            if module.name in self._names:
                raise StageConfigError(f"--lora-modules: the name {module.name!r} is taken; give each adapter its own")
            self.lora_requests[module.name] = LoRARequest(module.name, number, module.path)

    @property
    def _names(self) -> list[str]:
        return [*(path.name for path in self.base_model_paths), *self.lora_requests]

    def model_name(self) -> str:
        """What answers call the model."""
        return self.base_model_paths[0].name

    async def check_model(self, model_name: str | None) -> ErrorResponse | None:
        """An answer for who asks for a model that is not served."""
        if not model_name or model_name in self._names:
            return None
        return create_error_response(
            message=f"The model `{model_name}` does not exist.",
            err_type="NotFoundError",
            status_code=HTTPStatus.NOT_FOUND,
            param="model",
        )

    async def show_available_models(self) -> ModelList:
        cards = [
            ModelCard(id=path.name, root=path.model_path, permission=[ModelPermission()])
            for path in self.base_model_paths
        ]
        cards += [
            ModelCard(id=name, root=adapter.path, parent=self.model_name(), permission=[ModelPermission()])
            for name, adapter in self.lora_requests.items()
        ]
        return ModelList(data=cards)
