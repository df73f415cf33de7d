# SPDX-License-Identifier: Apache-2.0
"""What a chunk does to what is there, for a model that does not say otherwise."""

import torch

from vllm_omni.worker.input_chunks import extend_information


def test_tensors_are_appended_and_other_values_replaced():
    first = torch.ones(2, 3)
    information = {"rows": first, "speaker": "a", "codes": [1], "kept": 1.5}
    extend_information(information, {"rows": torch.zeros(1, 3), "speaker": "b", "codes": [2], "new": torch.ones(1)})
    assert information["rows"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert (information["speaker"], information["codes"], information["kept"]) == ("b", [2], 1.5)
    assert information["new"].tolist() == [1] and first.shape == (2, 3)


def test_a_tensor_takes_the_place_of_another_kind_of_value():
    information = {"rows": None}
    extend_information(information, {"rows": torch.ones(1)})
    extend_information(information, {})
    assert information["rows"].tolist() == [1]
