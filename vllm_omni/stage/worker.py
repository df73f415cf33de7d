# SPDX-License-Identifier: Apache-2.0
"""The life of a stage process: an IO thread for each stage in it, and its engine."""

import os
import socket
import tempfile
import threading

import msgspec
import torch
from vllm.utils.system_utils import decorate_logs, set_process_title

from vllm_omni.stage.engines import make_stage_engine
from vllm_omni.stage.engines.base import Outbox, Started
from vllm_omni.stage.input_processor import load_stage_input_processor
from vllm_omni.stage.shell import StageShell
from vllm_omni.stage.spec import StageSpec


def main(spec_bytes: bytes, lifeline: socket.socket) -> None:
    """The whole life of a stage process.

    Raises:
        Exception: The stage could not start, or its engine broke; its parent is told.
    """
    spec = msgspec.json.decode(spec_bytes, type=StageSpec)
    _set_up_process(spec)
    outbox = Outbox()
    shell = StageShell(spec, lifeline, outbox)
    io_thread = threading.Thread(target=shell.run, name="stage-io", daemon=True)
    io_thread.start()
    engine = make_stage_engine(spec.stage, spec.model, outbox)
    trust_remote_code = spec.stage.engine_args.get("trust_remote_code", False)
    processor = load_stage_input_processor(spec.stage.custom_process_input_func, spec.model, trust_remote_code)
    shell.attach(engine, processor)
    engine.start()
    outbox.put(Started())
    engine.run()
    engine.close()
    io_thread.join()


def _set_up_process(spec: StageSpec) -> None:
    # vLLM leaves a rendezvous file in the temporary directory; here it goes with everything else.
    tempfile.tempdir = spec.run_dir
    set_process_title(spec.stage.name, prefix="vllm_omni")
    decorate_logs(spec.stage.name)
    if spec.num_threads is not None:
        torch.set_num_threads(spec.num_threads)
    if spec.stage.runtime.devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(spec.stage.runtime.devices)
