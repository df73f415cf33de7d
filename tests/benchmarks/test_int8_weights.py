# SPDX-License-Identifier: Apache-2.0
"""How `benchmarks/int8_weights.py` compares answers. No pipeline runs here."""

from collections.abc import Callable
from types import ModuleType


def test_tokens_are_equal_up_to_the_first_other_one(import_benchmark: Callable[[str], ModuleType]) -> None:
    int8 = import_benchmark("int8_weights")
    pairs = [((1, 2, 3), [1, 2, 3]), ((1, 2, 3), (1, 2)), ((4, 5, 6, 7), (4, 6, 6, 7))]
    assert [int8.num_equal(*pair) for pair in pairs] == [3, 2, 1]
    text = "1 of 3 answers are equal, and 60% of all tokens before another"
    assert int8.describe_equal(pairs) == f"{text}; the others differ from token 2 on, in the median"
    assert int8.describe_equal(pairs[:1]) == "1 of 1 answers are equal, and 100% of all tokens before another"
