# SPDX-License-Identifier: Apache-2.0
"""Fills a module with random weights under which a tiny model behaves like a trained one.

With the usual 0.02 initialisation a tiny model repeats one token, and comparing its outputs proves little. Here every
layer keeps the scale of its input, heads are sharp, and norms and gains differ from one, so that a missing norm or gain
changes the output.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

HEAD_GAIN = 3.0
EMBEDDING_STD = 0.5
SMALL_STD = 0.02
NORM_STD = 0.1
BRANCH_SCALE = 0.3


def fill_random(module: nn.Module, seed: int, layer_gain: float, heads: tuple[str, ...] = ()) -> None:
    """Overwrites every parameter, in the order of their names; buffers stay as they are.

    Args:
        seed: Equal seeds give equal weights, bit for bit.
        layer_gain: Scale of a layer's output relative to its input: at 2 tokens depend on the whole
            context, at 1 they repeat soon. Deep models need less.
        heads: Parts of parameter names that mark a layer whose outputs are logits.
    """
    generator = torch.Generator().manual_seed(seed)
    children = dict(module.named_modules())
    embeddings = {f"{name}.weight" for name, child in children.items() if isinstance(child, nn.Embedding)}
    strides = {
        f"{name}.weight": child.stride[0] for name, child in children.items() if isinstance(child, nn.ConvTranspose1d)
    }
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            noise = torch.empty(parameter.shape, dtype=torch.float32).normal_(generator=generator)
            if name in embeddings:
                value = EMBEDDING_STD * noise
            elif (
                parameter.dim() >= 2 and parameter[0].numel() > 1
            ):  # not the gains of a norm that broadcast over pixels
                gain = HEAD_GAIN if any(head in name for head in heads) else layer_gain
                value = gain / _fan_in(name, parameter, strides.get(name)) ** 0.5 * noise
            else:
                value = _vector(name, noise)
            parameter.copy_(value)


def limit_head(head: nn.Linear, live: list[int], favoured: int | None = None, factor: float = 1.0) -> None:
    """Limits a head to `live` ids: all other logits are 0, and some live one is always larger.

    `favoured` (an end-of-sequence id) gets its logit scaled by `factor`: more of them at larger factors.
    """
    with torch.no_grad():
        dead = torch.ones(head.weight.shape[0], dtype=torch.bool)
        dead[live] = False
        head.weight[dead] = 0
        if favoured is not None:
            head.weight[favoured] *= factor


@torch.no_grad()
def scale_output(layer: nn.Module, std: float, run: Callable[[], object]) -> None:
    """Scales the weight of `layer` so that its output has about the standard deviation `std` while `run` runs.

    By a power of two, which changes exponents only: the files stay identical however the sum was rounded.
    """
    outputs: list[torch.Tensor] = []
    hook = layer.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    run()
    hook.remove()
    weight: torch.Tensor = layer.weight  # type: ignore[assignment]
    weight *= 2.0 ** round(math.log2(std / outputs[-1].std().item()))


def _fan_in(name: str, parameter: torch.Tensor, stride: int | None) -> float:
    """Inputs that one output sums over. `stride` is that of a transposed convolution, None for all else."""
    if stride is not None:
        return parameter.shape[0] * parameter.shape[-1] / stride
    if "experts" in name or parameter.dim() == 2:  # experts are stacked, and not convolutions
        return parameter.shape[-1]
    return parameter[0].numel()


def _vector(name: str, noise: torch.Tensor) -> torch.Tensor:
    """Norms are about 1, gains of residual branches about 0.3, biases and all else about 0."""
    if name.endswith("bias"):
        return SMALL_STD * noise
    if name.endswith(("scale", "gamma")):
        return BRANCH_SCALE * (1 + NORM_STD * noise)
    if name.endswith(("alpha", "beta")):  # logarithms, in the vocoder's activations
        return NORM_STD * noise
    return 1 + NORM_STD * noise
