# SPDX-License-Identifier: Apache-2.0
"""The `vllm-omni` script, and what vLLM itself calls for `vllm ... --omni`.

It answers for the pipeline and hands every other command line to vLLM. Nothing is imported from vLLM
until then, so `--version` and `--help` also work where vLLM is missing.
"""

import sys

from vllm_omni import __version__
from vllm_omni.errors import OmniError
from vllm_omni.vllm_requirement import find_vllm, require_vllm

USAGE = """\
usage: vllm-omni [--help] [--version]
       vllm-omni COMMAND ...            the same as: vllm COMMAND ...
       vllm-omni serve MODEL --omni     not in this version

Any-to-any models as a pipeline of vLLM engines. In this version a pipeline is used from Python:

    from vllm_omni import OmniLLM

    with OmniLLM("MODEL") as omni:
        outputs = omni.generate([{"prompt": "..."}])
"""

NO_SERVING = (
    f"vllm_omni {__version__} does not serve over HTTP yet, so --omni is refused. "
    "Use the offline API: `from vllm_omni import OmniLLM`, then `OmniLLM(MODEL).generate(prompts)`."
)


def main() -> None:
    """Runs the command line in `sys.argv`; exits with 1 if it was refused or vLLM is not usable."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
    elif arguments[0] in ("-v", "--version"):
        print(_version_line())
    elif "--omni" in arguments:
        sys.exit(f"vllm-omni: error: {NO_SERVING}")
    else:
        _run_vllm()


def _version_line() -> str:
    found = [f"{name} {version}" for name, version in find_vllm().items()]
    return f"vllm-omni {__version__} ({', '.join(found) or 'vLLM is not installed'})"


def _run_vllm() -> None:
    try:
        require_vllm()
    except OmniError as error:
        sys.exit(f"vllm-omni: error: {error}")
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()
