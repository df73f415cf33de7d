# SPDX-License-Identifier: Apache-2.0
"""The first moments of a pipeline. Imports nothing heavy, so that two processes can do that at the same time."""

from typing import TYPE_CHECKING, Any

from vllm_omni.errors import PipelineStartError
from vllm_omni.orchestrator.fork_server import ForkServer
from vllm_omni.vllm_requirement import require_vllm

if TYPE_CHECKING:
    from vllm_omni.entrypoints.pipeline import Pipeline


def start_fork_server() -> ForkServer:
    """What stages will be forked from; it imports vLLM while this process does something else.

    Raises:
        VllmRequirementError: vLLM is missing or is another version.
        PipelineStartError: The system refuses a process, or files.
    """
    require_vllm()
    try:
        return ForkServer(preload=["vllm_omni.stage.engines.llm", "vllm.model_executor.model_loader"])
    except OSError as error:
        raise PipelineStartError.from_system(error) from error


def launch_pipeline(*args: Any, fork_server: ForkServer | None, **kwargs: Any) -> "Pipeline":
    """Calls `open_pipeline` on a fork server, which it takes over; on a new one if there is none.

    Raises:
        VllmRequirementError: vLLM is missing or is another version.
        PipelineStartError: The system refuses what the pipeline needs, or a stage failed.
    """
    server = fork_server or start_fork_server()
    try:
        from vllm_omni.entrypoints.pipeline import open_pipeline

        return open_pipeline(server, *args, **kwargs)
    except BaseException:
        server.close()
        raise
