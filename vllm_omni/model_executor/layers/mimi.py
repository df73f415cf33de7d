# SPDX-License-Identifier: Apache-2.0
"""Mimi, the codec of several speech models: its encoder, and its decoder as a vocoder with state.

References: `MimiModel` of HF transformers, of which both take the parameters under the same names.
"""

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import MimiConfig, MimiModel
from transformers.models.mimi.modeling_mimi import MimiConv1d, MimiConvTranspose1d, MimiResnetBlock
from vllm.config import VllmConfig

from vllm_omni.model_executor.layers.causal_convs import CausalConv, StatefulConv, TransposedConv
from vllm_omni.model_executor.layers.causal_state import LayerStates, StateKeys
from vllm_omni.model_executor.layers.causal_vocoder import CausalVocoder
from vllm_omni.model_executor.layers.vocoder import load_own


class MimiEncoder(nn.Module):
    """Encodes whole sounds, one at a time."""

    def __init__(self, config: MimiConfig, num_quantizers: int | None = None) -> None:
        """
        Args:
            num_quantizers: Of those of `config`, the first that are used; None for all.
        """
        super().__init__()
        model = _make_model(config)
        for part in ("decoder", "decoder_transformer", "upsample"):
            delattr(model, part)
        self.model = model
        self.num_quantizers = num_quantizers

    def load(self, weights: dict[str, torch.Tensor]) -> set[str]:
        """Loads Mimi's weights; those of its decoder are not read. Returns the names of the loaded parameters."""
        return {f"model.{name}" for name in load_own(self.model, weights)}

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        """float32 `[samples]` -> `[frames, num_quantizers]` int64, one frame for each 1920 samples (rounded up)."""
        return self.model.encode(sound[None, None], num_quantizers=self.num_quantizers).audio_codes[0].T


class OmniMimi(CausalVocoder):
    """Mimi's decoder."""

    checkpoint_prefix: ClassVar[str] = ""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        self.config: MimiConfig = config
        self.mimi = StatefulMimi(_make_model(config))
        self.hop = self.mimi.hop

    @property
    def network(self) -> "StatefulMimi":
        return self.mimi

    def activation_bytes(self, num_rows: int) -> int:
        """See `SupportsActivationEstimate`. The decoder's last layers are the widest."""
        return self.widest_bytes(num_rows, self.config.num_filters)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        prefix = self.checkpoint_prefix
        own = {name.removeprefix(prefix): tensor for name, tensor in weights if name.startswith(prefix)}
        return {f"mimi.{name}" for name in load_own(self.mimi, own)}


class StatefulMimi(nn.Module):
    """The decoder for batches of windows."""

    def __init__(self, model: Any) -> None:
        """
        Args:
            model: A `MimiModel`.

        Raises:
            ValueError: It is not causal.
        """
        super().__init__()
        config = model.config
        if not config.use_causal_conv or config.pad_mode != "constant" or config.trim_right_ratio != 1.0:
            raise ValueError("only a causal Mimi can decode in windows: pad_mode constant, trim_right_ratio 1.0")
        self.config = config
        self.quantizer = model.quantizer
        self.upsample = TransposedConv(model.upsample.conv)
        self.decoder_transformer = model.decoder_transformer
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(_as_stateful(layer) for layer in model.decoder.layers)
        self.hop = self.upsample.rate * math.prod(config.upsampling_ratios)
        keys = config.num_hidden_layers * config.num_key_value_heads * config.head_dim  # and as many values
        self._state_size = 2 * keys * (config.sliding_window - 1) + sum(
            layer.state_size for layer in self.modules() if isinstance(layer, StatefulConv)
        )

    def new_state(self) -> torch.Tensor:
        return self.upsample.conv.weight.new_zeros(self._state_size)

    def forward(self, codes: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """See `CausalNetwork`."""
        x = self.upsample.extend(self.quantizer.decode(codes), states)
        x = self._transform(x.transpose(1, 2), states).transpose(1, 2)
        layers: Any = self.decoder.layers
        for layer in layers:
            x = layer.extend(x, states) if isinstance(layer, (StatefulConv, ResidualBlock)) else layer(x)
        return x[:, 0]

    def _transform(self, x: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """`[B, L, hidden]` -> the same shape."""
        keys: Any = StateKeys(states, self.config.sliding_window)
        return self.decoder_transformer(
            x,
            attention_mask=keys.mask(x.device),
            position_ids=keys.positions(x.device),
            past_key_values=keys,
            return_dict=True,
        ).last_hidden_state


class ResidualBlock(nn.Module):
    """Two activations and convolutions, and the sum with their input."""

    def __init__(self, block: MimiResnetBlock) -> None:
        super().__init__()
        self.block = nn.ModuleList(_as_stateful(layer) for layer in block.block)
        self.shortcut = _as_stateful(block.shortcut)

    def extend(self, x: torch.Tensor, states: LayerStates) -> torch.Tensor:
        """`[B, C, L]` -> the same shape."""
        hidden = x
        for layer in self.block:
            hidden = layer.extend(hidden, states) if isinstance(layer, StatefulConv) else layer(hidden)
        shortcut = self.shortcut
        return hidden + (shortcut.extend(x, states) if isinstance(shortcut, StatefulConv) else shortcut(x))


def _as_stateful(layer: nn.Module) -> nn.Module:
    if isinstance(layer, MimiConv1d):
        return CausalConv(layer.conv)
    if isinstance(layer, MimiConvTranspose1d):
        return TransposedConv(layer.conv)
    return ResidualBlock(layer) if isinstance(layer, MimiResnetBlock) else layer


def _make_model(config: MimiConfig) -> Any:
    """Makes the model in float32, whatever the other stages' dtype: it is small, and its sums are long."""
    return MimiModel._from_config(config, dtype=torch.float32).eval().requires_grad_(False)
