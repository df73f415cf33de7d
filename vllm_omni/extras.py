# SPDX-License-Identifier: Apache-2.0
"""The commands that install what an extra of this distribution requires. Reads installed metadata only."""

from importlib import metadata


def install_command(extra: str, *names: str) -> str:
    """A command that works beside a checkout and beside a wheel.

    It names the packages, not the extra: a package index has another project of this distribution's name.

    Args:
        extra: As in `pyproject.toml`.
        names: Packages of it; none are all of them.
    """
    requirements = _requirements(extra)
    chosen = [line for name, line in requirements.items() if not names or name in names]
    if not chosen:  # It is imported from a checkout that is not installed.
        return f"pip install '.[{extra}]' in a checkout of this project"
    return "pip install " + " ".join(f"'{line}'" for line in chosen)


def _requirements(extra: str) -> dict[str, str]:
    """What the extra adds: requirements without their markers, by the name of the package."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("vllm-omni") or []
    except metadata.PackageNotFoundError:
        return {}
    added = {}
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            requirement.marker = None
            added[requirement.name] = str(requirement)
    return added
