# SPDX-License-Identifier: Apache-2.0
"""Every dense tensor can be sent to another process; other values are refused with their name."""

import msgspec
import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_omni.payloads import (
    AdditionalInformationPayload,
    Guidance,
    OmniEngineCoreRequest,
    PromptEmbedsPayload,
    TensorPayload,
)

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.complex64, torch.complex128, torch.bool),
]


def transfer(payload):
    """Through vLLM's encoder and decoder, as between two processes."""
    frames = [bytes(frame) for frame in MsgpackEncoder().encode(payload)]
    return MsgpackDecoder(type(payload)).decode(frames)


def random_bits(dtype, *shape):
    if dtype is torch.bool:
        return torch.randint(2, shape).bool()
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    return torch.randint(256, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


def assert_same(actual, expected):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else t for t in (actual, expected)]
    assert torch.equal(*as_bytes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestEveryDtype:
    @pytest.mark.parametrize("shape", [(3, 5), (2, 1, 4), (300,), (), (0,), (4, 0, 2)], ids=str)
    def test_shapes(self, dtype, shape):
        tensor = random_bits(dtype, *shape)
        assert_same(transfer(TensorPayload.from_tensor(tensor)).to_tensor(), tensor)

    def test_strides(self, dtype):
        tensor = random_bits(dtype, 6, 4)
        for view in (tensor.t(), tensor[::2, 1:3], tensor[3], tensor[:0], tensor[0, 0], tensor[0].expand(3, 4)):
            assert_same(TensorPayload.from_tensor(view).to_tensor(), view)


def test_conjugates_and_gradients():
    tensor = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(TensorPayload.from_tensor(tensor.conj()).to_tensor(), tensor.conj().resolve_conj())
    assert not TensorPayload.from_tensor(torch.ones(2, requires_grad=True)).to_tensor().requires_grad


def test_decoded_tensors_are_writable_and_own_their_memory():
    payload = transfer(PromptEmbedsPayload.from_tensor(torch.zeros(200, 4)))
    first, second = payload.to_tensor(), payload.to_tensor()
    first += 1
    assert second.sum() == 0 and payload.to_tensor().sum() == 0


@pytest.mark.parametrize(
    "tensor", [torch.eye(3).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "without data"]
)
def test_only_dense_tensors_are_supported(tensor):
    with pytest.raises(TypeError, match="dense"):
        TensorPayload.from_tensor(tensor)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (TensorPayload(b"\0" * 7, [2], "float32"), "8 bytes, got 7"),
        (TensorPayload(b"\0" * 8, [3], "float32"), "12 bytes, got 8"),
        (TensorPayload(b"\0" * 8, [2], "float33"), "float33"),
        (TensorPayload(b"\0" * 8, [2], "nn"), "nn"),
    ],
)
def test_damaged_payloads_are_refused(payload, message):
    with pytest.raises(ValueError, match=message):
        payload.to_tensor()


class TestAdditionalInformation:
    def test_values_of_every_kind(self):
        values = {
            "tensor": torch.arange(5),
            "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
            "text": "ethan",
            "number": 3,
            "fraction": 0.25,
            "flag": True,
            "nothing": None,
            "data": b"\0\1",
            "plain list": [1, "two", [3.0, None]],
            "tensors": [torch.zeros(2), {"inner": torch.ones(1), "depth": 2}],
            "nested": {"a": {"b": torch.ones(2, 2)}, "empty": {}, "list": []},
        }
        decoded = transfer(AdditionalInformationPayload.from_dict(values)).to_dict()
        assert list(decoded) == list(values)
        for name in ("text", "number", "fraction", "flag", "nothing", "data", "plain list"):
            assert decoded[name] == values[name] and type(decoded[name]) is type(values[name])
        assert_same(decoded["tensor"], values["tensor"])
        assert_same(decoded["scalar"], values["scalar"])
        assert_same(decoded["tensors"][1]["inner"], torch.ones(1))
        assert decoded["tensors"][1]["depth"] == 2
        assert_same(decoded["nested"]["a"]["b"], torch.ones(2, 2))
        assert decoded["nested"]["empty"] == {} and decoded["nested"]["list"] == []

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"a": {"b": [1, object()]}}, r"additional_information\['a'\]\['b'\]\[1\] is a object"),
            ({"a": np.float64(1.0)}, "float64"),
            ({"a": np.zeros(2)}, "ndarray"),
            ({"a": {1: 2}}, "keys are strings"),
            ({2: 2}, "keys are strings"),
            ([1], "must be a dict"),
        ],
    )
    def test_errors_name_the_unsupported_value(self, values, message):
        with pytest.raises(TypeError, match=message):
            AdditionalInformationPayload.from_dict(values)


class TestRequest:
    def make(self, **fields):
        return OmniEngineCoreRequest(
            request_id="r",
            prompt_token_ids=[1, 2],
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=3),
            pooling_params=None,
            arrival_time=0.5,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            **fields,
        )

    def test_it_is_decoded_as_our_class(self):
        payload = AdditionalInformationPayload.from_dict({"rows": torch.randn(100, 8), "speaker": "ethan"})
        request = transfer(self.make(prompt_embeds=torch.randn(2, 300), additional_information=payload))
        assert type(request) is OmniEngineCoreRequest
        assert request.prompt_embeds.shape == (2, 300)
        decoded = request.additional_information.to_dict()
        assert decoded["speaker"] == "ethan" and decoded["rows"].shape == (100, 8)

    def test_without_additional_information(self):
        assert transfer(self.make()).additional_information is None

    def test_guidance(self):
        assert transfer(self.make(guidance=Guidance([5, 6], 2.0))).guidance == Guidance([5, 6], 2.0)

    def test_our_fields_follow_all_of_vllms(self):
        """They are encoded by position: vLLM's own decoder must still read the rest."""
        num_fields = len(EngineCoreRequest.__struct_fields__)
        assert OmniEngineCoreRequest.__struct_fields__[:num_fields] == EngineCoreRequest.__struct_fields__
        frames = MsgpackEncoder().encode(self.make(priority=4, guidance=Guidance([5, 6], 2.0)))
        assert MsgpackDecoder(EngineCoreRequest).decode(frames).priority == 4

    def test_all_fields_of_vllms_request_are_kept(self):
        ours = self.make(priority=4, session_id="s")
        base = EngineCoreRequest(**{name: getattr(ours, name) for name in EngineCoreRequest.__struct_fields__})
        again = OmniEngineCoreRequest.from_engine_core_request(base, None)
        assert msgspec.structs.asdict(again) == msgspec.structs.asdict(ours)
