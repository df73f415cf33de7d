# SPDX-License-Identifier: Apache-2.0
"""Where the shipped stage configurations are. It does not know what they say."""

from pathlib import Path


def stage_configs_dir() -> Path:
    """The folder of the shipped stage configurations: for each model one YAML, and variants for other machines.

    The same place in a wheel, in an editable install and in a checkout on `PYTHONPATH`.
    """
    return Path(__file__).parents[1] / "stage_configs"


def find_stage_configs(path: str) -> Path:
    """The file that a caller names: its path, or the name of a shipped one without `.yaml`."""
    shipped = stage_configs_dir() / f"{path}.yaml"
    is_name = not Path(path).suffix and Path(path).name == path
    return shipped if is_name and shipped.exists() and not Path(path).exists() else Path(path)


def shipped_variants(path: Path | None) -> list[Path]:
    """The shipped configurations for other machines of the model that a shipped one is for: `MODEL_MACHINE.yaml`.

    Args:
        path: A stage configuration; of one that does not ship, no variants are known.
    """
    if path is None or path.parent != stage_configs_dir():
        return []
    shipped = sorted(stage_configs_dir().glob("*.yaml"))
    stems = [other.stem for other in shipped if path.stem == other.stem or path.stem.startswith(f"{other.stem}_")]
    model = min(stems, key=len)
    return [other for other in shipped if other != path and (other.stem == model or other.stem.startswith(f"{model}_"))]
