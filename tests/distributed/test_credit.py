# SPDX-License-Identifier: Apache-2.0
"""Credit: both sides agree."""

import random

from vllm_omni.distributed.credit import Credit, Refund


def test_requests_and_bytes_are_limited() -> None:
    credit = Credit(max_requests=2, max_bytes=100)
    credit.spend(1, 10)
    assert not credit.is_spent
    credit.spend(1, 0)
    assert credit.is_spent
    credit.refund(1, 10)
    assert not credit.is_spent
    credit.spend(0, 100)
    assert credit.is_spent
    credit.reset()
    assert not credit.is_spent


def test_a_limit_of_zero_requests_allows_one() -> None:
    assert not Credit(max_requests=0, max_bytes=100).is_spent


def test_withheld_refunds_never_stop_the_feeder() -> None:
    """Refunds are collected for a larger message: never so many that credit stays spent."""
    for seed in range(50):
        choose = random.Random(seed)
        limits = choose.randint(1, 9), choose.randint(1, 1000)
        credit, refund = Credit(*limits), Refund(*limits)
        for _ in range(200):
            sent = (1, choose.randint(0, 2 * limits[1]))
            credit.spend(*sent)
            refund.add(*sent)
            due = refund.take_due()
            if due is not None:
                credit.refund(*due)
            assert not credit.is_spent
