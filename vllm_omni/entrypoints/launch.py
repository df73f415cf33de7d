# SPDX-License-Identifier: Apache-2.0
"""The first moments of a pipeline. Imports nothing heavy, so that two processes can do that at the same time."""

from typing import TYPE_CHECKING, Any

from vllm_omni.stage.fork_server import ForkServer
from vllm_omni.vllm_requirement import require_vllm

if TYPE_CHECKING:
    from vllm_omni.entrypoints.pipeline import Pipeline


def launch_pipeline(*args: Any, **kwargs: Any) -> "Pipeline":
    """Calls `open_pipeline` on a new fork server, which imports vLLM while this process does.

    Raises:
        VllmRequirementError: vLLM is missing or is another version.
    """
    require_vllm()
    server = ForkServer(preload=["vllm_omni.stage.engines.llm", "vllm.model_executor.model_loader"])
    try:
        from vllm_omni.entrypoints.pipeline import open_pipeline

        return open_pipeline(server, *args, **kwargs)
    except BaseException:
        server.close()
        raise
