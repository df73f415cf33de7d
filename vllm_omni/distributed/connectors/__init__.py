# SPDX-License-Identifier: Apache-2.0
"""How payloads travel between processes: a connector sends them, a receiver of the reference's type reads them."""

import os
from pathlib import Path

from vllm_omni.config.stage_config import ConnectorConfig
from vllm_omni.distributed.connectors.base import Connector, InlineConnector, Receiver
from vllm_omni.distributed.connectors.network import FetchedReceiver
from vllm_omni.distributed.connectors.shared_memory import (
    SharedMemoryConnector,
    SharedMemoryReceiver,
    payload_prefix,
    remove_payloads,
    remove_segments,
)
from vllm_omni.distributed.messages import InlineRef, NetworkRef, SharedMemoryRef

__all__ = [
    "Connector",
    "InlineConnector",
    "Receiver",
    "SharedMemoryConnector",
    "SharedMemoryReceiver",
    "make_connector",
    "make_receivers",
    "remove_payloads",
    "remove_segments",
]


def make_connector(config: ConnectorConfig, run_dir: Path, sender: int, receiver: int) -> Connector:
    """The connector that `runtime.connectors` configures, for payloads of this process from one stage to another.

    Args:
        run_dir: The pipeline's run directory.
    """
    if config.name == "InlineConnector":
        return InlineConnector()
    prefix = payload_prefix(os.getpid(), sender, receiver)
    return SharedMemoryConnector(run_dir, prefix, config.shm_threshold_bytes)


def make_receivers(run_dir: Path) -> dict[type, Receiver]:
    """A receiver for each type of reference.

    Args:
        run_dir: The pipeline's run directory: no file outside of it is opened.
    """
    return {InlineRef: InlineConnector(), SharedMemoryRef: SharedMemoryReceiver(run_dir), NetworkRef: FetchedReceiver()}
