# SPDX-License-Identifier: Apache-2.0
"""Digests of the rows that a model reads: equal for equal beginnings, and for no others."""

import pytest
import torch

from vllm_omni.core.sched.row_hashes import digest_rows
from vllm_omni.payloads import AdditionalInformationPayload

SIZE = 4
ROWS = torch.arange(30.0).reshape(10, 3)
FLAGS = torch.arange(10) % 2 == 0
POSITIONS = torch.arange(36).reshape(3, 12)  # two more than rows


def digest(rows=ROWS, flags=FLAGS, positions=POSITIONS, **further) -> list[bytes]:
    information = {"rows": rows, "flags": flags, "mrope_positions": positions, **further}
    return digest_rows(AdditionalInformationPayload.from_dict(information), ["rows", "flags"], SIZE)


def changed(tensor: torch.Tensor, *place: int) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[place] = ~tensor[place] if tensor.dtype == torch.bool else tensor[place] + 1
    return tensor


def test_only_full_blocks_have_a_digest():
    assert len(digest()) == 2 and len(digest(ROWS[:3])) == 0


def test_a_longer_prompt_begins_with_the_same_digests_whatever_follows():
    longer = digest(
        torch.cat((ROWS, ROWS)), torch.cat((FLAGS, FLAGS)), torch.cat((POSITIONS, POSITIONS + 9), dim=1), voice="a"
    )
    assert longer[:2] == digest() and len(set(longer)) == len(longer) == 5


@pytest.mark.parametrize(
    "change",
    [
        {"rows": changed(ROWS, 5, 2)},
        {"flags": changed(FLAGS, 5)},
        *({"positions": changed(POSITIONS, axis, 7)} for axis in range(3)),
    ],
)
def test_a_change_reaches_its_block_and_those_after_it(change):
    first, second = digest(**change)
    assert (first == digest()[0], second == digest()[1]) == (True, False)


def test_bytes_of_another_dtype_or_shape_are_other_rows():
    assert digest(ROWS.view(torch.int32))[0] != digest()[0]
    assert digest(ROWS.reshape(10, 3, 1))[0] != digest()[0]
