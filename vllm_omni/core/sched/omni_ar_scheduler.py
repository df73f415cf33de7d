# SPDX-License-Identifier: Apache-2.0
"""The scheduler of autoregressive stages."""

from vllm_omni.core.sched.omni_scheduler_mixin import OmniSchedulerMixin


class OmniARScheduler(OmniSchedulerMixin):
    """vLLM's scheduler; newly scheduled requests carry their additional information."""
