# SPDX-License-Identifier: Apache-2.0
"""What a stage may be sent: the two sides of the account agree."""

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


def test_a_limit_of_none_still_lets_one_through() -> None:
    assert not Credit(max_requests=0, max_bytes=100).is_spent


def test_what_is_given_back_late_never_stops_the_feeder() -> None:
    """Part of the refund is held back for a larger message: never so much that credit stays spent."""
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
