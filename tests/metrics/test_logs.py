# SPDX-License-Identifier: Apache-2.0
import logging
import os
import sys
from collections.abc import Iterator

import pytest

from vllm_omni.metrics.logs import about, get_logger, log_to_stderr
from vllm_omni.metrics.text import SummaryLog


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What is logged below `vllm.omni`. vLLM's loggers do not propagate, so pytest's own fixture may not see it."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.omni")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


def texts(records: list[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records]


def test_loggers_are_below_vllm():
    assert get_logger("vllm_omni.stage.shell").name == "vllm.omni.stage.shell"


def test_lines_of_vllm_leave_a_programs_output(monkeypatch, capsys):
    for name in ("VLLM_LOGGING_STREAM", "VLLM_LOGGING_CONFIG_PATH"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    handler = logging.StreamHandler(sys.stdout)
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "handlers", [handler])
    log_to_stderr()
    get_logger("vllm_omni.x").error("failed")
    assert capsys.readouterr() == ("", "failed\n")
    assert os.environ["VLLM_LOGGING_STREAM"] == "ext://sys.stderr"  # of stages
    handler.setStream(sys.stdout)
    log_to_stderr()  # The variable is the user's word.
    get_logger("vllm_omni.x").error("failed")
    assert capsys.readouterr() == ("failed\n", "")


def test_a_line_names_its_request_and_its_stage(records):
    log = about(get_logger("vllm_omni.stage.shell"), stage="stage 1 (talker)")
    log.warning("restarted %d times", 3)
    about(log, request_id="7").error("failed")
    about(get_logger("vllm_omni.x"), request_id="7").info("done")
    assert texts(records) == [
        "stage 1 (talker): restarted 3 times",
        "request 7, stage 1 (talker): failed",
        "request 7: done",
    ]


def test_a_line_has_the_file_that_logged_it(records):
    about(get_logger("vllm_omni.x"), request_id="7").error("failed")
    assert records[0].filename == "test_logs.py"


@pytest.mark.parametrize(("request_id", "shown"), [("100%s", "100?s"), ("7\nERROR forged", "7?ERROR forged")])
def test_an_id_cannot_break_a_line(records, request_id, shown):
    about(get_logger("vllm_omni.x"), request_id=request_id).error("failed: %s", "why")
    assert texts(records) == [f"request {shown}: failed: why"]


def test_the_summary_of_a_request(records, summarize):
    SummaryLog().request_ended(summarize())
    assert texts(records) == [
        "request 7, stage 0 (thinker): 12 in, 5 out, 6.000 s, of which 1.000 s in the queue",
        "request 7, stage 3 (talker): 0 in, 0 out, 6.000 s, of which 0.000 s in the queue",
        "request 7: completed after 10.000 s, TTFT 2.500 s, time per output token 1.000 s, TTFA 4.000 s, RTF 0.500",
    ]


def test_the_summary_of_a_request_for_an_image(records, summarize):
    SummaryLog().request_ended(
        summarize(stages=[], first_text=None, first_audio=None, audio_seconds=0.0, first_image=1003.0)
    )
    assert texts(records) == ["request 7: completed after 10.000 s, TTFI 3.000 s"]


def test_the_summary_of_a_failed_request(records, summarize):
    SummaryLog().request_ended(
        summarize(stages=[], outcome="StageDeadError", failed_stage="talker", first_text=None, first_audio=None)
    )
    assert texts(records)[0].startswith("request 7: StageDeadError in talker after 10.000 s")
