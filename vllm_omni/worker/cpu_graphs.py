# SPDX-License-Identifier: Apache-2.0
"""Steps of decoding on a CPU without the Python of the model: the operations of one are captured, and replayed.

A step of one row has some twenty operations in each layer, and between them as much Python: modules, contexts, checks
of arguments. It depends on the number of rows alone, which is what a CUDA graph on a GPU relies on, too. So for each
number of rows the operations of one step are recorded, attention's included, and later steps call them one after the
other, in the same order and with the same kernels: the results are the same, to the bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CompilationMode, VllmConfig
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.model_executor.layers.attention.attention import unified_attention_with_output, unified_kv_cache_update
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

_MAX_ROWS = 16
"""Of a step that is captured. The more rows, the less of a step is Python."""
_IGNORED = {"max_seq_len"}
"""Numbers in the metadata of vLLM's attention on a CPU that change with each step, and which it does not read."""
_READS_CONTEXT: dict[str, Callable[..., Any]] = {
    "vllm::unified_attention_with_output": unified_attention_with_output,
    "vllm::unified_kv_cache_update": unified_kv_cache_update,
}
"""Operations of vLLM in Python that find the metadata of the step by themselves: what they call is captured."""


class CPUGraphs(CPUModelRunner):
    """A base of our runners: steps of text that compute one token of each request are captured and replayed."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        # They belong to the model.
        self._graphs: dict[tuple[Any, ...], Callable[..., torch.Tensor] | None] = {}
        self._captures = can_capture(self.get_model(), self.vllm_config)

    def _model_forward(
        self,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        forward = partial(
            super()._model_forward, input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs
        )
        has_more = model_kwargs or intermediate_tensors is not None or inputs_embeds is not None
        if not self._captures or has_more or input_ids is None or positions is None or len(input_ids) > _MAX_ROWS:
            return forward()
        step = StepInputs.of(input_ids, positions, get_forward_context())
        if step is None:
            return forward()
        if step.key not in self._graphs:
            self._graphs[step.key], output = capture(forward, step.tensors)
            return output
        replay = self._graphs[step.key]
        return forward() if replay is None else replay(*step.tensors)


def can_capture(model: nn.Module, config: VllmConfig) -> bool:
    """Whether vLLM declares that the Python of the model depends on shapes alone, and nothing adds to it."""
    is_declared = any(isinstance(module, TorchCompileWithNoGuardsWrapper) for module in model.modules())
    return (
        is_declared
        and config.compilation_config.mode == CompilationMode.NONE
        and config.lora_config is None
        and config.parallel_config.world_size == 1
        and not config.model_config.is_encoder_decoder
        and config.kv_transfer_config is None  # Connectors load and save within the attention.
    )


@dataclass(frozen=True)
class StepInputs:
    """What one step of a model differs in from another one.

    Attributes:
        key: Steps with the same one call the same operations.
        tensors: What these read of the step.
    """

    key: tuple[Any, ...]
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> "StepInputs | None":
        """None for a step that is not captured: one with a prompt, or with other attention."""
        if not isinstance(context.attn_metadata, dict) or not isinstance(context.slot_mapping, dict):
            return None
        tensors = [input_ids, positions, *_distinct(context.slot_mapping.values())]
        key: list[Any] = [len(input_ids), positions.ndim]
        for metadata in _distinct(context.attn_metadata.values()):
            if type(metadata) is not CPUAttentionMetadata or metadata.max_query_len != 1:
                return None
            for name, value in vars(metadata).items():
                if isinstance(value, torch.Tensor):
                    tensors.append(value)
                elif name not in _IGNORED:
                    key.append(value)
        return cls(tuple(key), tensors)


def _distinct(values: Any) -> list[Any]:
    """The values, each object once."""
    return list({id(value): value for value in values}.values())


@dataclass(frozen=True)
class Call:
    """One operation of a step, with what it got and returned."""

    operation: OpOverload
    args: Sequence[Any]
    kwargs: dict[str, Any]
    result: Any


class Recorder(TorchDispatchMode):
    """Inside, each operation is computed, and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []  # They keep all tensors, so that none gets the id of another one.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (opened := _READS_CONTEXT.get(func.name())) is not None:
            with self:
                return opened(*args, **kwargs)
        result = func(*args, **kwargs)
        self.calls.append(Call(func, args, kwargs, result))
        return result


def capture(
    forward: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[Callable[..., torch.Tensor] | None, torch.Tensor]:
    """Computes a step, and captures it.

    Args:
        inputs: Of the tensors that it reads those that another step has others for. All others are its constants.

    Returns:
        The function that computes such a step from its inputs, or None if the Python of the model reads results; and
        the result of this step.
    """
    with (recorder := Recorder()):
        output = forward()
    if not isinstance(output, torch.Tensor) or any(_is_read(call.result) for call in recorder.calls):
        return None, output
    return GraphBuilder(inputs).build(recorder.calls, output), output


def _is_read(result: Any) -> bool:
    """Whether the result of an operation is a number for Python, instead of tensors or none."""
    return isinstance(result, bool | int | float | complex)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


@dataclass(frozen=True)
class Line:
    """One call in the function.

    Attributes:
        reads, writes: Names of its variables.
        is_needed: It changes what it reads, or may do so.
    """

    text: str
    reads: set[str]
    writes: set[str]
    is_needed: bool


class GraphBuilder:
    """Makes a function of the calls of a step.

    Views of constants become constants; views that are the same as what they view, and results that nothing reads, are
    left out. Each result is released after its last use.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._parameters = [f"x{index}" for index in range(len(inputs))]
        self._variables = {id(tensor): name for tensor, name in zip(inputs, self._parameters, strict=True)}
        self._constants: dict[str, Any] = {}
        self._constant_names: dict[int, str] = {}

    def build(self, calls: Sequence[Call], output: torch.Tensor) -> Callable[..., torch.Tensor]:
        lines = [line for call in calls if (line := self._line(call)) is not None]
        result = self._expression(output)
        texts = _release(_needed(lines, result), result)
        source = "\n    ".join([f"def replay({', '.join(self._parameters)}):", *texts, f"return {result}"])
        exec(compile(source, "<graph of a step>", "exec"), self._constants)
        replay: Callable[..., torch.Tensor] = self._constants["replay"]
        return replay

    def _line(self, call: Call) -> Line | None:
        operation = call.operation
        read = list(_tensors([call.args, list(call.kwargs.values())]))
        if operation.is_view and not any(id(tensor) in self._variables for tensor in read):
            return None
        if operation.is_view and isinstance(call.result, torch.Tensor) and _is_same(call.result, read[0]):
            self._variables[id(call.result)] = self._expression(read[0])
            return None
        known = {id(tensor) for tensor in read}
        arguments = [self._expression(value) for value in call.args]
        arguments += [f"{name}={self._expression(value)}" for name, value in call.kwargs.items()]
        text = f"{self._constant(operation)}({', '.join(arguments)})"
        made = [tensor for tensor in _tensors(call.result) if id(tensor) not in known]
        for tensor in made:
            self._variables.setdefault(id(tensor), f"t{len(self._variables)}")
        reads = {self._variables[id(tensor)] for tensor in read if id(tensor) in self._variables}
        writes = {self._variables[id(tensor)] for tensor in made}
        if made:
            text = f"{self._targets(call.result, known)} = {text}"
        return Line(text, reads, writes, operation._schema.is_mutable or operation.namespace != "aten")

    def _targets(self, result: Any, known: set[int]) -> str:
        if isinstance(result, torch.Tensor):
            return "_" if id(result) in known else self._variables[id(result)]
        return f"({''.join(f'{self._targets(item, known)}, ' for item in result)})"

    def _expression(self, value: Any) -> str:
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._expression, value))}]"
        if isinstance(value, torch.Tensor) and id(value) in self._variables:
            return self._variables[id(value)]
        return repr(value) if value is None or type(value) in (bool, int, str) else self._constant(value)

    def _constant(self, value: Any) -> str:
        name = self._constant_names.setdefault(id(value), f"c{len(self._constant_names)}")
        self._constants[name] = value  # Which keeps its id.
        return name


def _is_same(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Some operations whose result may be a view make a copy (`to(copy=True)`)."""
    return view.dtype == tensor.dtype and view.is_set_to(tensor)


def _needed(lines: Sequence[Line], result: str) -> list[Line]:
    """Those whose results are read, or that change something."""
    read, needed = {result}, []
    for line in reversed(lines):
        if line.is_needed or line.writes & read:
            read |= line.reads
            needed.append(line)
    return needed[::-1]


def _release(lines: Sequence[Line], result: str) -> list[str]:
    """The texts of the lines, with the variables deleted after the last line that has them."""
    last = {name: index for index, line in enumerate(lines) for name in line.reads | line.writes}
    texts = []
    for index, line in enumerate(lines):
        texts.append(line.text)
        dead = sorted(n for n in line.reads | line.writes if last[n] == index and n != result and n[0] == "t")
        if dead:
            texts.append(f"del {', '.join(dead)}")
    return texts
