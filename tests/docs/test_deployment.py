# SPDX-License-Identifier: Apache-2.0
"""The files of docs/deployment.md, as far as they can be checked without Docker and systemd."""

import configparser
import shlex
import tomllib

import yaml
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.docs.pages import ROOT
from vllm_omni.config.utils import find_checkpoint
from vllm_omni.entrypoints.cli.serve import OmniServeCommand

DEPLOY = ROOT / "examples" / "deploy"


def test_the_unit_starts_a_server() -> None:
    unit = configparser.ConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "vllm-omni.service")
    program, command, model, *flags = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/vllm-omni") and command == "serve" and find_checkpoint(model) != model
    parser = OmniServeCommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    args = parser.parse_args([model, *flags])
    assert args.shutdown_timeout < int(unit["Service"]["TimeoutStopSec"])


def test_the_compose_file_scrapes_the_server_and_mounts_the_dashboard() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    (omni,) = [name for name, service in compose["services"].items() if "build" in service]
    (port, _) = compose["services"][omni]["ports"][0].split(":")
    contents = {name: yaml.safe_load(config["content"]) for name, config in compose["configs"].items()}
    (job,) = contents["prometheus"]["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"{omni}:{port}"]}]
    (mount,) = compose["services"]["grafana"]["volumes"]
    source, target, _ = mount.split(":")
    assert (DEPLOY / source).resolve() == ROOT / "examples" / "grafana.json"
    assert target.startswith(contents["dashboards"]["providers"][0]["options"]["path"])
    assert contents["datasource"]["datasources"][0]["uid"] == "prometheus"  # the dashboard's


def test_each_image_installs_both_packages() -> None:
    _, *commands = (ROOT / "Dockerfile").read_text().split("pip install")
    arguments = [shlex.split(command.replace("\\\n", "").split("\n")[0]) for command in commands]
    assert [words[-2:] for words in arguments] == [
        [".[cpu]", "./packages/coloured_shapes"],
        [".[cuda]", "./packages/coloured_shapes"],
    ]


def test_the_image_gets_all_that_the_build_reads() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {"pyproject.toml", "setup.cfg", "vllm_omni", "packages", "stage_configs", "scripts", project["readme"]}
    assert needed | set(project["license-files"]) == kept
    assert all((ROOT / name).exists() for name in kept)
