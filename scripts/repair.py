# SPDX-License-Identifier: Apache-2.0
"""Repairs torchvision, torchaudio and torchcodec in the environment that runs it, if their imports are broken.

The package index has CUDA builds of them only. With a CPU build of torch they do not import, and vLLM and transformers
import them if they are installed. torchvision is required: it gets two operator schemas (see `torchvision_ops.py`). The
other two are optional here: they are removed.

Run by `set_up.py` with the environment's own Python; independent of vllm_omni.
"""

import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

SHIM = Path(__file__).with_name("torchvision_ops.py")
PTH_LINE = f"import {SHIM.stem}; {SHIM.stem}.install()\n"
OPTIONAL = ("torchaudio", "torchcodec")


def main() -> None:
    repair_torchvision(Path(sysconfig.get_path("purelib")))
    for module in OPTIONAL:
        remove_if_broken(module)


def repair_torchvision(site_packages: Path) -> None:
    """Installs the shim if torchvision does not import without it; otherwise removes an earlier one."""
    shim, pth = site_packages / SHIM.name, site_packages / f"{SHIM.stem}.pth"
    shim.unlink(missing_ok=True)
    pth.unlink(missing_ok=True)
    if find_spec("torchvision") is None or import_error("torchvision") is None:
        return
    shutil.copyfile(SHIM, shim)
    pth.write_text(PTH_LINE)
    if error := import_error("torchvision"):
        sys.exit(f"torchvision does not import, and two operator schemas do not repair it:\n{error}")
    print(f"    torchvision: is a CUDA build; repaired with {pth.name} in {site_packages}", flush=True)


def remove_if_broken(module: str) -> None:
    if find_spec(module) is None or import_error(module) is None:
        return
    print(f"    {module}: does not import on this torch and is optional; removing it", flush=True)
    subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", module], check=True)


def import_error(module: str) -> str | None:
    """Imports the module in a process of its own; returns its error output if it failed."""
    result = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else result.stderr


if __name__ == "__main__":
    main()
