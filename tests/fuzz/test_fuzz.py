# SPDX-License-Identifier: Apache-2.0
"""A small run of the fuzzer against each kind of server; `python -m tests.fuzz` is the large one."""

import pytest

from tests.fuzz.campaign import Campaign, Summary
from tests.fuzz.fuzz_requests import ABORTED, CLOSED, NO_ANSWER, FuzzRequest, Outcome

GROUP = "server"
pytestmark = pytest.mark.slow

MAX_GROWTH = 256 << 20
SLACK_FILES = 8  # Threads and sockets that are created once.


def check(summary: Summary, least: int) -> None:
    print(summary)
    assert not summary.faults
    assert summary.counts.total() >= least
    statuses = {status for _, status in summary.counts}
    assert {200, 400} <= statuses, "valid requests, and wrong ones"
    assert summary.after.memory - summary.before.memory < MAX_GROWTH
    assert summary.after.files <= summary.before.files + SLACK_FILES


@pytest.mark.parametrize("kind", ["omni", "voice", "image", "video"])
def test_bad_requests_are_refused_and_leak_nothing(kind: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("schemathesis")
    server = request.getfixturevalue(f"{kind}_server")
    campaign = Campaign(kind, server.port, server.process.pid)
    check(campaign.run(num_written=75, num_described=1), least=75)


@pytest.mark.parametrize(
    ("sent", "status", "is_fault"),
    [
        (FuzzRequest("bad", "POST", "/"), 400, False),
        (FuzzRequest("bad", "POST", "/"), 200, True),
        (FuzzRequest("bad", "POST", "/"), 500, True),
        (FuzzRequest("bad", "POST", "/"), NO_ANSWER, True),
        (FuzzRequest("bad", "POST", "/"), CLOSED, True),
        (FuzzRequest("cut", "POST", "/", cut=5), CLOSED, False),
        (FuzzRequest("odd", "POST", "/", must_fail=False), 200, False),
        (FuzzRequest("odd", "POST", "/", must_fail=False), 503, True),
        (FuzzRequest("client abort", "POST", "/", must_fail=False, abort_after_s=0.1), ABORTED, False),
    ],
)
def test_what_counts_as_a_fault(sent: FuzzRequest, status: int | str, is_fault: bool) -> None:
    assert bool(Outcome(sent, status).fault) == is_fault
