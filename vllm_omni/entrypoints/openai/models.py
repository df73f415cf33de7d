# SPDX-License-Identifier: Apache-2.0
"""/v1/models of a pipeline without a vLLM stage: vLLM's own reads a context length that such a model does not have."""

from http import HTTPStatus

from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, ModelCard, ModelList, ModelPermission


class DiffusionModels:
    """Stands where vLLM's routes look for `OpenAIServingModels`."""

    def __init__(self, base_model_paths: list[BaseModelPath]) -> None:
        self.base_model_paths = base_model_paths

    def model_name(self) -> str:
        """What answers call the model."""
        return self.base_model_paths[0].name

    async def check_model(self, model_name: str | None) -> ErrorResponse | None:
        """An answer for who asks for a model that is not served."""
        if not model_name or any(path.name == model_name for path in self.base_model_paths):
            return None
        return create_error_response(
            message=f"The model `{model_name}` does not exist.",
            err_type="NotFoundError",
            status_code=HTTPStatus.NOT_FOUND,
            param="model",
        )

    async def show_available_models(self) -> ModelList:
        return ModelList(
            data=[
                ModelCard(id=path.name, root=path.model_path, permission=[ModelPermission()])
                for path in self.base_model_paths
            ]
        )
