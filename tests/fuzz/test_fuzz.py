# SPDX-License-Identifier: Apache-2.0
"""A small run of the fuzzer against each kind of server; `python -m tests.fuzz` is the large one."""

import pytest

from tests.fuzz.campaign import Campaign, Summary
from tests.fuzz.shots import CLOSED, LEFT, NO_ANSWER, Outcome, Shot

pytestmark = pytest.mark.slow

MAX_GROWTH = 256 << 20
SLACK_FILES = 8  # Threads and sockets that are made once.


def check(summary: Summary, least: int) -> None:
    print(summary)
    assert not summary.faults
    assert summary.counts.total() >= least
    statuses = {status for _, status in summary.counts}
    assert {200, 400} <= statuses, "good requests, and bad ones"
    assert summary.after.memory - summary.before.memory < MAX_GROWTH
    assert summary.after.files <= summary.before.files + SLACK_FILES


@pytest.mark.parametrize("kind", ["omni", "painting", "video"])
def test_bad_requests_are_refused_and_leave_nothing_behind(kind: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("schemathesis")
    server = request.getfixturevalue(f"{kind}_server")
    campaign = Campaign(kind, server.port, server.process.pid)
    check(campaign.run(num_written=75, num_described=1), least=75)


@pytest.mark.parametrize(
    ("shot", "status", "is_fault"),
    [
        (Shot("bad", "POST", "/"), 400, False),
        (Shot("bad", "POST", "/"), 200, True),
        (Shot("bad", "POST", "/"), 500, True),
        (Shot("bad", "POST", "/"), NO_ANSWER, True),
        (Shot("bad", "POST", "/"), CLOSED, True),
        (Shot("cut", "POST", "/", cut=5), CLOSED, False),
        (Shot("odd", "POST", "/", must_fail=False), 200, False),
        (Shot("odd", "POST", "/", must_fail=False), 503, True),
        (Shot("leaves", "POST", "/", must_fail=False, leaves_after=0.1), LEFT, False),
    ],
)
def test_what_counts_as_a_fault(shot: Shot, status: int | str, is_fault: bool) -> None:
    assert bool(Outcome(shot, status).fault) == is_fault
