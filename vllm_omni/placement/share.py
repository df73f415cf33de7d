# SPDX-License-Identifier: Apache-2.0
"""What a replica gets of its machine, computed and checked there: the orchestrator does not know other machines."""

import os

import msgspec

from vllm_omni.config.stage_config import OmniStageConfig, PartOfPipeline, StageInstance
from vllm_omni.errors import StageConfigError
from vllm_omni.placement.budgets import apply_budgets
from vllm_omni.placement.cores import place_cores
from vllm_omni.placement.spec import MachineShare, StagePlacement


def take_share(share: MachineShare, instance_id: int, model: str) -> tuple[StageInstance, StagePlacement]:
    """A replica with its devices and its budget on this machine, and its cores.

    Args:
        model: The pipeline's checkpoint.

    Raises:
        StageConfigError: The replicas of this machine need more than it has, or name something that does not exist.
    """
    for path in share.paths:
        if not os.path.exists(path):
            raise StageConfigError(
                f"there is no {path} here; a checkpoint that is a path must exist on every node (a name on the hub is "
                "fetched by each)"
            )
    part = _make_part(share)
    return apply_budgets(part).instances[instance_id], place_cores(part, model)[instance_id]


def _make_part(share: MachineShare) -> PartOfPipeline:
    """The replicas on this machine."""
    config = share.pipeline
    stages = [_with_devices(stage, config.replicas[stage.stage_id], share) for stage in config.stage_args]
    return PartOfPipeline(stage_args=stages, runtime=config.runtime, instance_ids=sorted(share.devices))


def _with_devices(stage: OmniStageConfig, replicas: list[StageInstance], share: MachineShare) -> OmniStageConfig:
    given = [share.devices.get(replica.instance_id) for replica in replicas]
    if not any(given):
        return stage
    runtime = msgspec.structs.replace(stage.runtime, devices=[entry or "0" for entry in given])
    return msgspec.structs.replace(stage, runtime=runtime)
