# SPDX-License-Identifier: Apache-2.0
"""For the tests that need an NVIDIA GPU: `scripts/gpu_check.sh` runs them. Without one they skip, and say why.

The references run on the CPU, in float32. Results of a GPU in float32 are compared with those at a tolerance for other
orders of summation, so NVIDIA's libraries must not round to TensorFloat-32, as cuDNN does by default, and neither must
vLLM's attention in Triton.
"""

import os
import shutil

import pytest

from tests.gpu.pipelines import Case, speak_with_transformers
from vllm_omni.entrypoints import omni_base
from vllm_omni.launch.fork_server import ForkServer
from vllm_omni.testing.media import mixed_prompts

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # read when the libraries are loaded, by every process
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # read when a kernel is compiled


@pytest.fixture(autouse=True, scope="session")
def _gpu() -> None:
    if reason := why_no_gpu():
        pytest.skip(reason)
    omni_base.ForkServer = ForkServer  # type: ignore[misc]  # As users have it.


def why_no_gpu() -> str | None:
    """What is missing here for these tests; uses no device."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return f"needs the CUDA build of vLLM (make OMNI_EXTRA=cuda) and an NVIDIA GPU; {current_platform.device_type=}"
    if shutil.which("nvidia-smi") is None:
        return "needs nvidia-smi, which comes with NVIDIA's driver"
    return None


@pytest.fixture(scope="session", params=["qwen2_5_omni", "qwen3_omni_moe"])
def case(request: pytest.FixtureRequest, _gpu: None) -> Case:
    model = request.getfixturevalue(f"tiny_{request.param}")
    prompts = mixed_prompts(model, 8, seed=10)
    return Case(request.param, model, prompts, speak_with_transformers(model, prompts))
