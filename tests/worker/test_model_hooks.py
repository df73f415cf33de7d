# SPDX-License-Identifier: Apache-2.0
"""Hooks are found by what a model has, not by what it derives from."""

import torch
from torch import nn

from tests.engine.hooked_models import CollectingQwen3, DoublingVocoder, HookedQwen3
from vllm_omni.worker.host_copy import HostCopy
from vllm_omni.worker.model_hooks import ModelHooks


def without_weights(cls):
    model = cls.__new__(cls)
    nn.Module.__init__(model)
    return model


def test_a_model_of_vllm_has_none():
    hooks = ModelHooks.of(nn.Linear(1, 1))
    assert hooks == ModelHooks() and hooks.emits_prompt_rows


def test_a_model_with_all():
    model = without_weights(HookedQwen3)
    hooks = ModelHooks.of(model)
    assert hooks == ModelHooks(model, model, model, aux_layers=(2,), wants_information=False)
    assert not hooks.emits_prompt_rows


def test_a_model_that_takes_chunks_in_by_itself():
    model = without_weights(CollectingQwen3)
    assert ModelHooks.of(model).input_chunks is model
    assert ModelHooks.of(without_weights(HookedQwen3)).input_chunks is None


def test_a_forward_that_wants_information():
    assert ModelHooks.of(without_weights(DoublingVocoder)).wants_information


def test_what_is_on_the_host_is_not_copied():
    tensors = [torch.zeros(2), torch.ones(1)]
    assert all(copy is tensor for copy, tensor in zip(HostCopy(tensors).wait(), tensors, strict=True))
    assert HostCopy([]).wait() == []
