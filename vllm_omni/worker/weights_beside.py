# SPDX-License-Identifier: Apache-2.0
"""Weights of a vLLM worker that change while it runs: its model is loaded again, and takes the place of the first one.

So all that is made of weights is made again by the code that made it: packed and rounded copies, tables, filters, the
state of feedback. Until then nothing of the first model has changed.
"""

from dataclasses import dataclass
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_omni.worker.cpu_half_weights import HalfWeightsConfig

_MISSING = object()


@dataclass
class _Loaded:
    """
    Attributes:
        attributes: Of the model runner, that loading a model sets.
        layers, moe_layers: Of vLLM's compilation configuration, where layers of a model enter themselves.
    """

    attributes: dict[str, Any]
    layers: dict[str, Any]
    moe_layers: list[str]


class WeightsBesideWorker(Worker):
    """A base of our workers."""

    _loaded: _Loaded | None = None

    def weight_bytes(self) -> int:
        """The bytes of the model's parameters; without what is packed or made of them."""
        return sum(parameter.nbytes for parameter in self.get_model().parameters())

    def load_weights_beside(self, folder: str) -> None:
        """Loads a checkpoint of the same model beside the one that is computed with.

        The stage has refused it for a model that is compiled or on an accelerator: code and graphs belong to the first.

        Raises:
            Exception: It cannot be loaded.
        """
        config, model, load = self.vllm_config.compilation_config, self.model_config, self.load_config
        runner, quantization = self.model_runner, self.vllm_config.quant_config
        attributes = dict(vars(runner))
        before = config.static_forward_context, config.static_all_moe_layers
        place = model.model, model.revision, load.load_format
        try:
            config.static_forward_context, config.static_all_moe_layers = {}, []
            model.model, model.revision, load.load_format = folder, None, "auto"
            if isinstance(quantization, HalfWeightsConfig):  # `load_model` decides on it.
                self.vllm_config.quant_config = None
            self.load_model()
            changed = {n: value for n, value in vars(runner).items() if attributes.get(n, _MISSING) is not value}
            self._loaded = _Loaded(changed, config.static_forward_context, config.static_all_moe_layers)
        finally:
            vars(runner).clear()
            vars(runner).update(attributes)
            config.static_forward_context, config.static_all_moe_layers = before
            model.model, model.revision, load.load_format = place
            self.vllm_config.quant_config = quantization

    def commit_weights(self) -> None:
        """Computes with the model that was loaded, in the same KV cache, which has to be forgotten.

        Layers of attention get what the first ones got after they were loaded, of the KV cache and its backend.
        """
        assert self._loaded is not None
        loaded, self._loaded = self._loaded, None
        config = self.vllm_config.compilation_config
        for name, layer in config.static_forward_context.items():
            own = vars(loaded.layers[name])
            own.update({key: value for key, value in vars(layer).items() if key not in own or key == "kv_cache"})
        config.static_forward_context, config.static_all_moe_layers = loaded.layers, loaded.moe_layers
        vars(self.model_runner).update(loaded.attributes)

    def drop_weights(self) -> None:
        """Drops the model that was loaded, if there is one."""
        self._loaded = None
