# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni doctor [MODEL]`: checks this installation and machine, and says what to do. Works where vLLM does not."""

import argparse
import sys
from collections.abc import Iterable, Iterator

from vllm_omni.entrypoints.cli import doctor_checks as checks
from vllm_omni.entrypoints.cli.doctor_checks import Finding
from vllm_omni.errors import StageConfigError

_DESCRIPTION = """\
Check this installation and this machine, and with MODEL also whether its pipeline fits here: versions, platform,
companions of torch, shared memory, open files, port, encoders, threads; stages, devices and memory. Starts nothing and
downloads no weights. Takes the options of `vllm serve MODEL --omni` too. Exits with 1 if something has to be fixed
before anything runs, or does not fit.
"""


def run_doctor(arguments: list[str]) -> None:
    """Prints one line for each check; exits with 1 if one failed, with 2 if the arguments cannot be used."""
    elsewhere = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    group = elsewhere.add_argument_group("another machine", "Check MODEL's memory there instead of here.")
    group.add_argument("--gpus", type=int, default=1, help="how many GPUs it has (1)")
    group.add_argument("--gpu-memory", metavar="SIZE", help="memory of each as its driver reports it, e.g. 79GiB")
    parser = argparse.ArgumentParser(
        "vllm-omni doctor",
        usage="vllm-omni doctor [MODEL] [--gpus N --gpu-memory SIZE] [options of vllm serve]",
        description=_DESCRIPTION,
        parents=[elsewhere],
        allow_abbrev=False,
    )
    parser.add_argument("--host", help="address that the server is to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port that the server is to listen on (8000)")
    has_model = bool(arguments) and not arguments[0].startswith("-")
    args, others = parser.parse_known_args(arguments[1:] if has_model else arguments)
    if others and not has_model:
        parser.error(f"{others[0]} is an option for a model, which comes first: vllm-omni doctor MODEL {others[0]} ...")
    of_machine, others = elsewhere.parse_known_args(arguments)
    if of_machine != elsewhere.parse_args([]) and not (has_model and args.gpu_memory and args.gpus > 0):
        parser.error("another machine is given as: vllm-omni doctor MODEL --gpus N --gpu-memory SIZE")
    devices = None
    if args.gpu_memory:
        try:
            devices = (_parse_bytes(args.gpu_memory),) * args.gpus
        except StageConfigError as error:
            parser.error(f"--gpu-{error}")
    failed = False
    for finding in _examine(args, others if has_model else [], devices):
        _print(finding)
        failed |= finding.level == "FAIL"
    sys.exit(1 if failed else 0)


def _parse_bytes(memory: str) -> int:
    from vllm_omni.config.resources import parse_memory  # imports packages that may be missing

    size = parse_memory(memory)
    if isinstance(size, float):
        raise StageConfigError(f"memory {memory}: write bytes with a unit, e.g. 79GiB")
    return size


def _examine(args: argparse.Namespace, arguments: list[str], devices: tuple[int, ...] | None) -> Iterator[Finding]:
    """
    Args:
        args: Where the server is to listen.
        arguments: What would stand after `vllm serve`; empty where there is no model to check.
        devices: Bytes of each GPU of the machine that the model is to run on; None: this machine's.
    """
    yield from checks.check_python()
    yield from checks.check_packages()
    yield from checks.check_companions()
    platform, found = checks.probe_platform()
    yield from found
    num_processes, needed = 1, checks.SHARED_MEMORY
    if arguments and platform is not None:
        from vllm_omni.entrypoints.cli.doctor_model import check_model, shared_memory_needed

        config, findings = check_model(arguments, platform, devices)
        yield from findings
        if config is not None:
            num_processes, needed = len(config.processes), shared_memory_needed(config)
    elif arguments:
        yield Finding("WARN", "configuration", f"{arguments[0]} is not checked: that needs a vLLM that works")
    yield from checks.check_shared_memory(needed)
    yield from checks.check_open_files()
    yield from checks.check_port(args.host, args.port)
    yield from checks.check_encoders()
    if platform is not None:
        yield from checks.check_threads(platform.device_type, num_processes)


def _print(finding: Finding) -> None:
    print(f"{finding.level:<4}  {finding.subject:<14}  {_indented(finding.message.splitlines())}", flush=True)
    if finding.remedy:
        print(f"{'':22}-> {_indented(finding.remedy.splitlines(), 25)}", flush=True)


def _indented(lines: Iterable[str], width: int = 22) -> str:
    return f"\n{'':{width}}".join(lines)
