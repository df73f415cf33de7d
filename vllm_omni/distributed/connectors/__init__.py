# SPDX-License-Identifier: Apache-2.0
"""How payloads travel between stages. See `base.Connector`."""

from vllm_omni.distributed.connectors.base import Connector
from vllm_omni.distributed.connectors.inline import InlineConnector
from vllm_omni.distributed.connectors.shared_memory import SharedMemoryConnector
from vllm_omni.distributed.connectors.threshold import ThresholdConnector

__all__ = ["Connector", "InlineConnector", "SharedMemoryConnector", "ThresholdConnector"]
