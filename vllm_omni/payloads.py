# SPDX-License-Identifier: Apache-2.0
"""Tensors and plain values of a request as structs, and the engine request with them.

Payloads are msgspec structs of bytes and plain values: they cross processes without pickle, and keep every dtype and
shape that torch can store densely.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

_PLAIN_TYPES = (str, int, float, bool, bytes, type(None))


class TensorPayload(msgspec.Struct, frozen=True):
    """One dense tensor.

    Attributes:
        data: The elements in row-major order, native byte order.
        shape: Empty for a 0-dimensional tensor.
        dtype: torch's name without the prefix, e.g. `bfloat16`.
    """

    data: bytes
    shape: list[int]
    dtype: str

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> "TensorPayload":
        """
        Raises:
            TypeError: The tensor is sparse, quantized or has no storage of its own.
        """
        return cls(data=_tensor_bytes(tensor), shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))

    def to_tensor(self) -> torch.Tensor:
        """A writable CPU tensor with memory of its own.

        Raises:
            ValueError: Data, shape and dtype do not match.
        """
        dtype = _dtype_from_name(self.dtype)
        expected = math.prod(self.shape) * dtype.itemsize
        if len(self.data) != expected:
            raise ValueError(f"{self.dtype} {self.shape} takes {expected} bytes, got {len(self.data)}")
        if not expected:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=torch.uint8).view(dtype).reshape(self.shape)


class PromptEmbedsPayload(TensorPayload, frozen=True):
    """Prompt embeddings `[len, hidden]`, floating point."""


class AdditionalInformationEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One value of a request's additional information: exactly one field is set, or none for the value None.

    Attributes:
        tensor: A tensor.
        value: A plain value: str, int, float, bool, bytes, or a list of plain values.
        items: A list that holds a tensor or a dict somewhere inside.
        entries: A dict.
    """

    tensor: TensorPayload | None = None
    value: Any = None
    items: "list[AdditionalInformationEntry] | None" = None
    entries: "dict[str, AdditionalInformationEntry] | None" = None

    @classmethod
    def from_value(cls, value: Any, name: str) -> "AdditionalInformationEntry":
        """
        Args:
            value: A tensor, a plain value, or lists and string-keyed dicts of these.
            name: The location of the value, for error messages.

        Raises:
            TypeError: The value, or one inside it, is of another type.
        """
        if isinstance(value, torch.Tensor):
            return cls(tensor=TensorPayload.from_tensor(value))
        if _is_plain(value):
            return cls(value=value)
        if isinstance(value, list | tuple):
            return cls(items=[cls.from_value(item, f"{name}[{i}]") for i, item in enumerate(value)])
        if isinstance(value, dict):
            return cls(entries=_entries_from_dict(value, name))
        raise TypeError(f"{name} is a {type(value).__name__}; only tensors, plain values, lists and dicts can be sent")

    def to_value(self) -> Any:
        if self.tensor is not None:
            return self.tensor.to_tensor()
        if self.items is not None:
            return [item.to_value() for item in self.items]
        if self.entries is not None:
            return {key: entry.to_value() for key, entry in self.entries.items()}
        return self.value


class AdditionalInformationPayload(msgspec.Struct, frozen=True):
    """The inputs of a request besides its prompt, for the model's hooks, by name."""

    entries: dict[str, AdditionalInformationEntry]

    @classmethod
    def from_dict(cls, information: dict[str, Any]) -> "AdditionalInformationPayload":
        """
        Raises:
            TypeError: A key is not a string, or a value has an unsupported type; the message names it.
        """
        if not isinstance(information, dict):
            raise TypeError(f"additional_information must be a dict, got a {type(information).__name__}")
        return cls(entries=_entries_from_dict(information, "additional_information"))

    def to_dict(self) -> dict[str, Any]:
        """The values, tensors decoded onto the CPU; tuples come back as lists."""
        return {key: entry.to_value() for key, entry in self.entries.items()}


class Guidance(msgspec.Struct, frozen=True):
    """Classifier-free guidance of a request: its tokens are sampled from `uncond + scale * (cond - uncond)`, where
    `cond` are the logits after its own prompt, `uncond` those after another one; the sampled tokens follow both.

    Attributes:
        prompt_token_ids: The other prompt, of any length.
        scale: 1 is no guidance of the tokens: for a model that guides something else with the states of both.
    """

    prompt_token_ids: list[int]
    scale: float


# vLLM's request is encoded by position, so fields of ours may only be appended.
class OmniEngineCoreRequest(EngineCoreRequest, array_like=True, omit_defaults=True, gc=False):
    """vLLM's preprocessed request, and the additional information and guidance of its stage.

    vLLM's `MsgpackEncoder` and `MsgpackDecoder(OmniEngineCoreRequest)` encode and decode it.

    Attributes:
        token_information: As in `StageInput`: these rows identify the prompt in the prefix cache. Empty: its tokens do.
        forced_token_ids: What it generates, before a stop token. Empty: what it samples.
        owner: Whose request it is: grammars are compiled in turn for each owner.
    """

    additional_information: AdditionalInformationPayload | None = None
    guidance: Guidance | None = None
    token_information: list[str] = msgspec.field(default_factory=list)
    forced_token_ids: list[int] = msgspec.field(default_factory=list)
    owner: str = ""

    @classmethod
    def from_engine_core_request(
        cls,
        request: EngineCoreRequest,
        additional_information: AdditionalInformationPayload | None,
        guidance: Guidance | None = None,
        token_information: Sequence[str] = (),
        forced_token_ids: Sequence[int] = (),
    ) -> "OmniEngineCoreRequest":
        fields = {name: getattr(request, name) for name in EngineCoreRequest.__struct_fields__}
        return cls(
            **fields,
            additional_information=additional_information,
            guidance=guidance,
            token_information=list(token_information),
            forced_token_ids=list(forced_token_ids),
        )

    def make_twin(self) -> "OmniEngineCoreRequest":
        """The unconditional sequence of a request with guidance. Its own samples are never used."""
        params = self.sampling_params
        assert self.guidance is not None and params is not None
        return msgspec.structs.replace(
            self,
            request_id=f"{self.request_id}/unconditional",
            prompt_token_ids=self.guidance.prompt_token_ids,
            prompt_embeds=None,
            prompt_is_token_ids=None,
            mm_features=None,
            # Sampled as its request, so that a batch of one kind stays one.
            sampling_params=SamplingParams(temperature=params.temperature, max_tokens=params.max_tokens),
            additional_information=None,
            guidance=None,
            forced_token_ids=[],
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return type(value) in _PLAIN_TYPES  # exactly: subclasses, such as numpy scalars, do not survive msgpack


def _entries_from_dict(values: dict[Any, Any], name: str) -> dict[str, AdditionalInformationEntry]:
    for key in values:
        if not isinstance(key, str):
            raise TypeError(f"{name} has the key {key!r}; keys are strings")
    return {key: AdditionalInformationEntry.from_value(value, f"{name}[{key!r}]") for key, value in values.items()}


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(f"only dense tensors with data can be sent, not {tensor.layout} on {tensor.device}")
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # As bytes, because numpy has no bfloat16 and no float8. An empty tensor cannot be viewed as another dtype.
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def _dtype_from_name(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype
