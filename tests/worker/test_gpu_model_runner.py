# SPDX-License-Identifier: Apache-2.0
"""Hooks of a model, chunks of input, copies to the host; without an engine."""

import torch
from torch import nn

from tests.engine.hooked_models import DoublingVocoder, HookedQwen3
from vllm_omni.worker.gpu_model_runner import ModelHooks, extend_information
from vllm_omni.worker.step import HostCopy


def without_weights(cls):
    model = cls.__new__(cls)
    nn.Module.__init__(model)
    return model


def test_a_model_of_vllm_has_no_hooks():
    hooks = ModelHooks.of(nn.Linear(1, 1))
    assert hooks == ModelHooks() and hooks.emits_prompt_rows


def test_a_model_with_all_hooks():
    model = without_weights(HookedQwen3)
    hooks = ModelHooks.of(model)
    assert hooks == ModelHooks(model, model, model, aux_layers=(2,), takes_information=False)
    assert not hooks.emits_prompt_rows


def test_a_forward_that_takes_information():
    assert ModelHooks.of(without_weights(DoublingVocoder)).takes_information


def test_tensors_on_the_host_are_not_copied():
    tensors = [torch.zeros(2), torch.ones(1)]
    assert all(copy is tensor for copy, tensor in zip(HostCopy(tensors).wait(), tensors, strict=True))
    assert HostCopy([]).wait() == []


def test_tensors_are_appended_and_other_values_replaced():
    first = torch.ones(2, 3)
    information = {"rows": first, "speaker": "a", "codes": [1], "kept": 1.5}
    extend_information(information, {"rows": torch.zeros(1, 3), "speaker": "b", "codes": [2], "new": torch.ones(1)})
    assert information["rows"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert (information["speaker"], information["codes"], information["kept"]) == ("b", [2], 1.5)
    assert information["new"].tolist() == [1] and first.shape == (2, 3)


def test_a_tensor_replaces_a_value_of_another_kind():
    information = {"rows": None}
    extend_information(information, {"rows": torch.ones(1)})
    extend_information(information, {})
    assert information["rows"].tolist() == [1]
