# SPDX-License-Identifier: Apache-2.0
"""The `vllm-omni` script, and the function that vLLM itself calls for `vllm ... --omni`.

Commands other than those below and those of installed packages (`ModelPackage.commands`) are vLLM's. A command imports
vLLM when it runs, so that `--version`, `--help` and `doctor` also work without vLLM.
"""

import atexit
import difflib
import errno
import gc
import logging
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

from vllm_omni.entrypoints.cli.serve_help import CONFIG_USAGE, SERVE_USAGE, config_page, serve_page
from vllm_omni.errors import OmniError, UsageError
from vllm_omni.model_packages import find_models
from vllm_omni.version import __version__
from vllm_omni.vllm_requirement import describe_import, find_vllm, name_cpu_build, require_vllm

USAGE = """\
usage: vllm-omni serve MODEL [options]         serve a model over HTTP; the same as: vllm serve MODEL --omni
       vllm-omni config show MODEL [options]   print its stage configuration, and the source of each value
       vllm-omni bench serve [options]         benchmark a server; the same as: vllm bench serve --omni
       vllm-omni run-batch [options]           answer a file of requests; the same as: vllm run-batch --omni
       vllm-omni demo [FOLDER] [options]       a sentence answered in speech, and pictures seen and painted
{of_packages}       vllm-omni doctor [MODEL] [options]      check this installation and machine, and print remedies
       vllm-omni COMMAND ...                   any other command is vLLM's: vllm COMMAND ...
       vllm-omni [--help] [--version]

Any-to-any models as a pipeline of vLLM engines. `vllm-omni serve --help` prints more, `--help=omni` lists our
options, `--help=all` all of them. From Python:

    from vllm_omni import OmniLLM

    with OmniLLM("MODEL") as omni:
        outputs = omni.generate([{"prompt": "..."}])
"""


_NEAR = 0.75
"""How alike a mistyped command is, from 0 to 1; none of vLLM's own is as near to one of ours."""


def main() -> None:
    """Runs the command line in `sys.argv`; exits with 1 if that failed, with 2 if it is wrong."""
    atexit.register(_end_quietly)
    words = sys.argv[1:]
    arguments = [argument for argument in words if argument != "--omni"]
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        print(_usage(), end="")
    elif command in ("-v", "--version"):
        print(_version_line())
    elif command in _COMMANDS:
        _run(_COMMANDS[command], arguments[1:])
    else:
        _run_other(command, arguments, is_omni=len(arguments) < len(words))


def _usage() -> str:
    lines = [
        f"       vllm-omni {f'{name} {command.usage}':<30}{command.summary}\n"
        for name, command in find_models().commands.items()
    ]
    return USAGE.replace("{of_packages}", "".join(lines))


def _run_other(command: str, arguments: list[str], is_omni: bool) -> None:
    """Runs a command of an installed package, or of vLLM, unless it is a mistyped one of ours."""
    models = find_models()
    if command in models.commands:
        _run(lambda words: pkgutil.resolve_name(models.commands[command].function)(words), arguments[1:])
        return
    for package, reason in models.broken.items():
        print(f"vllm-omni: {package} is left out: {reason}", file=sys.stderr)
    known = [*_COMMANDS, *models.commands]
    if near := difflib.get_close_matches(command, known, 1, _NEAR):
        _fail(f"there is no command {command!r}; did you mean {near[0]!r}?", 2)
    if is_omni:
        _fail(f"--omni is for {', '.join(known)}; leave it out for {command}", 2)
    _run(_run_vllm, arguments)


def _end_quietly() -> None:
    """Triton prints a page about its own leaks when the interpreter has ended."""
    with suppress(ValueError, OSError):  # The streams may be closed.
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _version_line() -> str:
    found = [f"{name} {version}" for name, version in find_vllm().items()]
    return f"vllm-omni {__version__} ({', '.join(found) or 'vLLM is not installed'})"


def _run(command: Callable[[list[str]], None], arguments: list[str]) -> None:
    """Prints errors that a user can fix as one message; other errors keep their traceback."""
    try:
        command(arguments)
    except Exception as error:
        if _report_broken_companions(error):
            sys.exit(1)
        if not isinstance(error, OmniError):
            raise
        logging.getLogger("vllm.omni").debug("The command failed.", exc_info=True)
        _fail(str(error), 2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        _fail("interrupted", 130)


def _report_broken_companions(error: BaseException) -> bool:
    """Prints what `doctor` finds, if the error is of a library that was built for another torch; whether it is."""
    from vllm_omni.entrypoints.cli.doctor import COMPANIONS, check_companions

    modules = set()
    cause: BaseException | None = error
    while cause is not None:
        modules |= {frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(cause.__traceback__)}
        cause = cause.__cause__ or cause.__context__
    if not {module.partition(".")[0] for module in modules} & set(COMPANIONS):
        return False
    broken = [finding for finding in check_companions() if finding.level != "OK"]
    for finding in broken:
        finding.print(sys.stderr)
    return bool(broken)


def _fail(message: str, code: int) -> None:
    print(f"vllm-omni: error: {message}", file=sys.stderr)
    sys.exit(code)


def _asks_for_help(arguments: list[str]) -> bool:
    """Not `--help=WORD`, which prints options."""
    return not {"-h", "--help"}.isdisjoint(arguments)


def _serve(arguments: list[str]) -> None:
    if _asks_for_help(arguments):
        print(serve_page(), end="")
        return
    _check_model(arguments, SERVE_USAGE)
    require_vllm()
    from vllm_omni.entrypoints import omni_base
    from vllm_omni.metrics.logs import get_logger, log_quietly

    # Importing vLLM takes seconds: the fork server is forked from this process after it. Not if the command starts
    # no stage, or if only the parsed flags set the fork server's environment.
    late = ("--help=", "--log-", "--config")
    is_late = any(argument.startswith(late) for argument in arguments)
    if not is_late:
        log_quietly()
        get_logger(__name__).info("%s: %s", _version_line(), describe_import())
    server = None if is_late else omni_base.start_fork_server(from_this_process=True)
    try:
        gc.disable()  # While modules are imported it finds nothing, and takes a fifth of the time.
        with _importing_vllm() if is_late else nullcontext():
            from vllm_omni.entrypoints.cli.serve import OmniServeCommand

        gc.enable()
        OmniServeCommand().serve(arguments, server)
    except OSError as error:
        is_file = error.filename is not None
        if is_file or error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
            raise
        _fail(f"the server's address cannot be used: {error.strerror}; choose another --port, --host or --uds", 1)
    finally:
        if server is not None:
            server.close()


def _config(arguments: list[str]) -> None:
    if _asks_for_help(arguments):
        print(config_page(), end="")
        return
    if arguments[:1] != ["show"]:
        raise UsageError(f"{' '.join(['config', *arguments[:1]])}: unknown; write: {CONFIG_USAGE}")
    _check_model(arguments[1:], CONFIG_USAGE)
    require_vllm()
    _log_warnings_only()
    with _importing_vllm():
        from vllm_omni.entrypoints.cli.config import ConfigCommand

    ConfigCommand().run(arguments[1:])


def _check_model(arguments: list[str], usage: str) -> None:
    """A model that is missing or mistyped is reported at once, not after the imports. Raises as `find_checkpoint`."""
    if not arguments:
        raise UsageError(f"the model is missing; write: {usage}")
    if not arguments[0].startswith("-"):
        from vllm_omni.config.utils import find_checkpoint  # imports packages that may be missing

        find_checkpoint(arguments[0])


@contextmanager
def _importing_vllm() -> Iterator[None]:
    from vllm_omni.metrics.logs import handle_import_warnings
    from vllm_omni.metrics.status_line import waiting

    with handle_import_warnings(), waiting(describe_import()):
        yield


def _log_warnings_only() -> None:
    """Logs warnings only, for commands whose output people or programs read."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def _doctor(arguments: list[str]) -> None:
    _log_warnings_only()
    from vllm_omni.entrypoints.cli.doctor import run_doctor

    run_doctor(arguments)


def _bench(arguments: list[str]) -> None:
    require_vllm()
    if arguments[:1] != ["serve"]:
        if "--omni" in sys.argv:
            raise UsageError("--omni is for bench serve; leave it out for the other benchmarks")
        _run_vllm(arguments)
        return
    _log_warnings_only()
    with _importing_vllm():
        from vllm_omni.entrypoints.cli.bench import run_bench_serve

    run_bench_serve(arguments[1:])


def _run_batch(arguments: list[str]) -> None:
    require_vllm()
    with _importing_vllm():
        from vllm_omni.entrypoints.cli.run_batch import run_batch

    run_batch(arguments)


def _demo(arguments: list[str]) -> None:
    require_vllm()
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    with _importing_vllm():
        from vllm_omni.entrypoints.cli.demo import run_demo

    run_demo(arguments)


_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}
"""Only the demo's own output. Before the imports, because libraries read these when they are loaded."""


def _run_vllm(arguments: list[str]) -> None:
    require_vllm()
    name_cpu_build()
    with _importing_vllm():
        from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


_COMMANDS = {
    "serve": _serve,
    "config": _config,
    "bench": _bench,
    "run-batch": _run_batch,
    "demo": _demo,
    "doctor": _doctor,
}
