# SPDX-License-Identifier: Apache-2.0
"""Where the shipped stage configurations are. It does not know what they say."""

from pathlib import Path


def stage_configs_dir() -> Path:
    """The folder of the shipped stage configurations, one YAML a model.

    The same place in a wheel, in an editable install and in a checkout on `PYTHONPATH`.
    """
    return Path(__file__).parents[1] / "stage_configs"
