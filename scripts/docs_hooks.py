# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: the pages that are made from code while the site is built.

`reference/options.md` has the flags of `vllm serve --omni`, `reference/configuration.md` and `reference/python.md` the
docstrings of the configuration and of the public classes, `changelog.md` the changelog. A file of the repository that a
page links to (`../examples/online/`) becomes a page below `source/`, so that the site is complete without a repository.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
GROUPS = ("Omni", "OmniAPI", "OmniLimits", "OmniDiffusion")
CONFIGURATION = {
    "vllm_omni.config.stage_config": (
        "PipelineConfig", "OmniStageConfig", "StageRuntimeConfig", "RuntimeConfig", "RuntimeDefaults", "EdgeConfig",
        "SegmentConfig", "RestartConfig", "ConnectorConfig",
    ),
    "vllm_omni.config.dit_config": ("DiTConfig",),
}  # fmt: skip
PUBLIC = (
    "vllm_omni.entrypoints.omni_llm.OmniLLM", "vllm_omni.entrypoints.async_omni_llm.AsyncOmniLLM",
    "vllm_omni.outputs.OmniRequestOutput", "vllm_omni.sampling_params.DiffusionSamplingParams",
    "vllm_omni.events.ARSegmentEvent", "vllm_omni.events.ImageProgressEvent", "vllm_omni.events.CompletedEvent",
    "vllm_omni.events.ErrorEvent", "vllm_omni.placement.devices.set_stage_gpu_devices", "vllm_omni.errors",
)  # fmt: skip
_OUTWARD = re.compile(r"\]\(\.\./([^)#]+)(?:#[^)]*)?\)")
_LANGUAGES = {
    ".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".md": "markdown", ".json": "json",
    ".service": "ini", "": "docker",
}  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that come from code."""
    written = [page for page in files.documentation_pages() if "/" not in page.src_uri]
    for path in sorted({path for page in written for path in outward_links(page.content_string)}):
        files.append(File.generated(config, source_page(path), content=show_source(path)))
    for name, content in (
        ("reference/options.md", "\n".join(describe_options())),
        ("reference/configuration.md", describe_configuration()),
        ("reference/python.md", describe_classes("Python classes", PUBLIC)),
        ("changelog.md", (ROOT / "CHANGELOG.md").read_text()),
    ):
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files of the repository lead to their pages."""
    if "/" in page.file.src_uri:  # made by `on_files`, or a page of `design/`, which links to pages only
        return markdown
    return _OUTWARD.sub(lambda match: f"]({source_page(match[1])})", markdown)


def outward_links(markdown: str) -> list[str]:
    """Paths below the repository's root that a page directly in `docs/` links to."""
    return _OUTWARD.findall(markdown)


def source_page(path: str) -> str:
    return f"source/{path.rstrip('/')}.md"


def show_source(path: str) -> str:
    """A file, or all files of a folder, as a page. A missing file is an error: the link is wrong."""
    target = ROOT / path
    files = sorted(f for f in target.rglob("*") if f.is_file()) if target.is_dir() else [target]
    shown = [file for file in files if file.suffix in _LANGUAGES]
    parts = [f"## {file.relative_to(ROOT)}\n\n{fenced(file)}" for file in shown]
    return "\n\n".join([f"# {path.rstrip('/')}", *parts]) + "\n"


def fenced(file: Path) -> str:
    return f"`````{_LANGUAGES[file.suffix]}\n{file.read_text().rstrip()}\n`````"


def describe_options() -> Iterator[str]:
    """The flags of `vllm serve --omni` beside vLLM's, from the parser itself."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_omni.entrypoints.cli.serve import OmniServeCommand

    parser = OmniServeCommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    yield "# Options of `vllm serve --omni`\n"
    yield "Made from the parser. vLLM's own options are in its documentation; [`cli.md`](../cli.md) says which apply.\n"
    groups = {group.title: group for group in parser._action_groups}
    for title in GROUPS:
        yield f"## {title}\n\n{groups[title].description}\n\n| option | default | meaning |\n|---|---|---|"
        for action in groups[title]._group_actions:
            yield describe_option(action)
        yield ""


def describe_option(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    default = "" if action.default in (None, {}, argparse.SUPPRESS) else f"`{action.default}`"
    text = (action.help or "").replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")
    return f"| {names} | {default} | {' '.join(text.split())} |"


def describe_configuration() -> str:
    names = [f"{module}.{name}" for module, classes in CONFIGURATION.items() for name in classes]
    return describe_classes("Configuration classes", names)


def describe_classes(title: str, names: tuple[str, ...] | list[str]) -> str:
    """A page of mkdocstrings' directives."""
    return "\n".join([f"# {title}\n", "Made from the docstrings.\n", *(f"::: {name}\n" for name in names)])
