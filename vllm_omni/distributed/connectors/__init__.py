# SPDX-License-Identifier: Apache-2.0
"""How payloads travel between processes: a connector sends them, a receiver of the reference's type reads them."""

from pathlib import Path

from vllm_omni.config.stage_config import ConnectorConfig
from vllm_omni.distributed.connectors.base import Connector, Receiver
from vllm_omni.distributed.connectors.inline import InlineConnector
from vllm_omni.distributed.connectors.shared_memory import SharedMemoryConnector, SharedMemoryReceiver
from vllm_omni.distributed.messages import InlineRef, SharedMemoryRef

__all__ = [
    "Connector",
    "InlineConnector",
    "Receiver",
    "SharedMemoryConnector",
    "SharedMemoryReceiver",
    "make_connector",
    "make_receivers",
]


def make_connector(config: ConnectorConfig, run_dir: Path, prefix: str) -> Connector:
    """The connector that `runtime.connectors` configures.

    Args:
        run_dir: The pipeline's run directory.
        prefix: Of the names of files in it; unique to the sender and the receiver.
    """
    if config.name == "InlineConnector":
        return InlineConnector()
    return SharedMemoryConnector(run_dir, prefix, config.shm_threshold_bytes)


def make_receivers() -> dict[type, Receiver]:
    """A receiver for each type of reference."""
    return {InlineRef: InlineConnector(), SharedMemoryRef: SharedMemoryReceiver()}
