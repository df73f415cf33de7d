# SPDX-License-Identifier: Apache-2.0
import ctypes
import io
import json
import logging
import logging.config
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from vllm.multimodal.media import audio

from vllm_omni.metrics import logs
from vllm_omni.metrics.logs import about, get_logger, log_quietly, log_to_stderr, quiet_start
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
    handler.name = "vllm"
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


@pytest.fixture
def vllm_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """vLLM's logger in a program without variables, as it is before vLLM is imported."""
    for name in [*(name for name in os.environ if name.startswith("VLLM_")), *logs._LIBRARIES]:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "")
    monkeypatch.delenv("VLLM_LOGGING_CONFIG_PATH")
    monkeypatch.setattr(logs, "_limit_torch_log", lambda: None)
    loggers = [logging.getLogger(name) for name in ("vllm", "vllm.omni", "vllm.multimodal.media.audio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.NOTSET)
    monkeypatch.setattr(loggers[0], "handlers", [])
    monkeypatch.setattr(loggers[0], "propagate", True)  # else pytest adds handlers of its own
    yield loggers[0]
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def handler_of_vllm() -> logging.Handler:
    """As vLLM's own import makes it."""
    handler = logging.StreamHandler(sys.stdout)
    handler.name = "vllm"
    handler.setFormatter(logging.Formatter("(MainProcess pid=1) %(message)s"))
    return handler


def test_a_program_starts_as_quietly_as_a_server(vllm_logger, capsys):
    with quiet_start():
        logging.config.dictConfig(json.loads(Path(os.environ["VLLM_LOGGING_CONFIG_PATH"]).read_text()))  # vLLM's import
        logging.getLogger("vllm.engine").warning("may cause the engine to crash")
        get_logger("vllm_omni.x").info("ready")
        assert logs.is_quiet() and logs.quiet_stream() is sys.stderr
    logging.getLogger("vllm.engine").warning("of a request")
    out, err = capsys.readouterr()
    assert out == "" and [line.split(maxsplit=3)[3] for line in err.splitlines()] == ["ready", "of a request"]
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"
    with quiet_start():  # a second pipeline
        logging.getLogger("vllm.engine").warning("may cause the engine to crash")
    assert capsys.readouterr() == ("", "")


def test_a_program_that_has_imported_vllm_starts_quietly(vllm_logger, monkeypatch, tmp_path, capsys):
    vllm_logger.setLevel(logging.INFO)
    monkeypatch.setattr(vllm_logger, "handlers", [handler_of_vllm()])
    own = logging.FileHandler(tmp_path / "log.txt", mode="w")  # of the program; once it is closed it writes no more
    logger = logging.getLogger("program")
    monkeypatch.setattr(logger, "handlers", [own])
    with quiet_start():
        logging.getLogger("vllm.engine").info("Initializing")
        get_logger("vllm_omni.x").info("ready")
        logger.warning("mine")
    own.close()
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"INFO \S+ \S+ ready\n", err)
    assert (tmp_path / "log.txt").read_text() == "mine\n"


@pytest.mark.parametrize(("before", "after"), [("WARNING", "ERROR"), ("INFO", "INFO")])
def test_a_library_that_was_imported_before_is_quiet_unless_the_program_has_set_it(
    vllm_logger, monkeypatch, before, after
):
    library = logging.getLogger("transformers")
    monkeypatch.setattr(library, "level", logging.getLevelName(before))
    with quiet_start():
        assert logging.getLevelName(library.level) == after


@pytest.mark.parametrize("configured", ["level", "handler", "variable"])
def test_a_program_keeps_what_it_has_configured(vllm_logger, monkeypatch, capsys, configured):
    vllm_logger.setLevel(logging.INFO)
    handler = handler_of_vllm()
    monkeypatch.setattr(vllm_logger, "handlers", [handler])
    if configured == "level":
        vllm_logger.setLevel(logging.WARNING)
    elif configured == "handler":
        handler.name = "mine"
    else:
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    with quiet_start():
        log_to_stderr()
        logging.getLogger("vllm.engine").warning("this")
        assert not logs.is_quiet()
    line = "(MainProcess pid=1) this\n"
    assert capsys.readouterr() == ((line, "") if configured == "handler" else ("", line))


def test_torch_that_was_imported_before_logs_errors_only(monkeypatch):
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    before, level.value = level.value, 1  # warnings
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    for name in logs._LIBRARIES:
        monkeypatch.setenv(name, "")  # so that it is restored
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "")
    monkeypatch.delenv("VLLM_LOGGING_CONFIG_PATH")
    monkeypatch.setattr(logs, "configure_process", lambda: None)
    try:
        log_quietly()
        assert level.value == 2 and logs.is_quiet()
    finally:
        level.value = before


def test_warnings_of_an_import_are_not_printed_by_python(monkeypatch, capsys):
    logger = logging.getLogger("vllm")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", False)
    with logs.handle_import_warnings():
        logger.warning("Triton is installed, but doesn't include CPU backend.")
    assert logger.handlers == [] and capsys.readouterr() == ("", "")
    logger.warning("later")
    assert capsys.readouterr().err == "later\n"


def test_vllm_does_not_warn_for_each_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    monkeypatch.setattr(audio, "_torchcodec_import_exc", ImportError("no such package"))
    monkeypatch.setattr(audio, "AudioDecoder", None)
    monkeypatch.setattr(logs, "is_quiet", lambda: True)
    loggers = {name: logging.getLogger(name) for name in ("vllm", "vllm.multimodal.media.audio")}
    levels = {name: logger.level for name, logger in loggers.items()}
    loggers["vllm.multimodal.media.audio"].addHandler(handler)
    file = io.BytesIO()
    soundfile.write(file, np.zeros(1600), 16_000, format="WAV")
    try:
        audio.load_audio(file, sr=None)
        assert len(found) == 1 and "torchcodec" in texts(found)[0]
        logs.log_warnings()
        audio.load_audio(file, sr=None)
        assert len(found) == 1
    finally:
        loggers["vllm.multimodal.media.audio"].removeHandler(handler)
        for name, level in levels.items():
            loggers[name].setLevel(level)


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
