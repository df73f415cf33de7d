# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: the pages that are made from code while the site is built.

`reference/options.md` has the flags of `vllm serve --omni`, `reference/configuration.md` and `reference/python.md` the
docstrings of the configuration and of the public classes, `changelog.md` the changelog. A file of the repository that a
page links to (`../examples/online/`) becomes a page below `source/`, so that the site is complete without a repository.
Diagrams become the pictures that scripts/diagrams.py has drawn, and no page may load anything from elsewhere: the site
works as files, without a network.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import diagrams
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
GROUPS = ("Omni", "OmniAPI", "OmniLimits", "OmniDiffusion")
CONFIGURATION = {
    "vllm_omni.config.stage_config": (
        "PipelineConfig", "RuntimeConfig", "RuntimeDefaults", "EdgeConfig", "SegmentConfig", "RestartConfig",
        "ConnectorConfig",
    ),
    "vllm_omni.config.stage": ("OmniStageConfig", "StageRuntimeConfig"),
    "vllm_omni.config.dit_config": ("DiTConfig",),
}  # fmt: skip
PUBLIC = (
    "vllm_omni.entrypoints.omni_llm.OmniLLM", "vllm_omni.entrypoints.async_omni_llm.AsyncOmniLLM",
    "vllm_omni.outputs.OmniRequestOutput", "vllm_omni.sampling_params.DiffusionSamplingParams",
    "vllm_omni.events.ARSegmentEvent", "vllm_omni.events.ImageProgressEvent", "vllm_omni.events.CompletedEvent",
    "vllm_omni.events.ErrorEvent", "vllm_omni.placement.devices.set_stage_gpu_devices", "vllm_omni.errors",
)  # fmt: skip
_LOADED = re.compile(
    r"<(?:script|img|iframe|audio|video|source|link)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'> ]+)"
)
_OUTWARD = re.compile(r"\]\(\.\./([^)#]+)(?:#[^)]*)?\)")
_GENERATED = {"CHANGELOG.md": "changelog.md"}
"""Pages that show a file of the repository as it is written."""
_LANGUAGES = {
    ".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".md": "markdown", ".json": "json",
    ".service": "ini", "": "docker",
}  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that come from code."""
    written = [page for page in files.documentation_pages() if "/" not in page.src_uri]
    outward = {path for page in written for path in outward_links(page.content_string)}
    for path in sorted(outward - _GENERATED.keys()):
        files.append(File.generated(config, source_page(path), content=show_source(path)))
    for name, content in (
        ("reference/options.md", "\n".join(describe_options())),
        ("reference/configuration.md", describe_configuration()),
        ("reference/python.md", describe_classes("Python classes", PUBLIC)),
        *((page, (ROOT / path).read_text()) for path, page in _GENERATED.items()),
    ):
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Diagrams are pictures, and links to files of the repository lead to their pages."""
    markdown = diagrams.FENCE.sub(lambda match: draw(Path(page.file.src_uri), match[1]), markdown)
    if "/" in page.file.src_uri:  # made by `on_files`, or a page of `design/`, which links to pages only
        return markdown
    return _OUTWARD.sub(lambda match: f"]({source_page(match[1])})", markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """
    Raises:
        PluginError: The page loads a script, a style or a picture from elsewhere.
    """
    if loaded := _LOADED.findall(output):
        raise PluginError(f"{page.file.src_uri}: loads {', '.join(loaded)}; without a network it would be incomplete")
    return output


def draw(page: Path, source: str) -> str:
    """The picture itself, so that it has the colours of the page.

    Raises:
        PluginError: It is not drawn yet.
    """
    file = diagrams.picture(page, source)
    if not file.is_file():
        raise PluginError(f"{page}: there is no {file.relative_to(ROOT)}; run scripts/diagrams.py")
    return f'<div class="diagram">{file.read_text().strip()}</div>'


def outward_links(markdown: str) -> list[str]:
    """Paths below the repository's root that a page directly in `docs/` links to."""
    return _OUTWARD.findall(markdown)


def source_page(path: str) -> str:
    return _GENERATED.get(path, f"source/{path.rstrip('/')}.md")


def show_source(path: str) -> str:
    """A file, or all files of a folder, as a page. A missing file is an error: the link is wrong."""
    target = ROOT / path
    files = sorted(f for f in target.rglob("*") if f.is_file()) if target.is_dir() else [target]
    shown = [file for file in files if file.suffix in (*_LANGUAGES, ".ipynb")]
    parts = [f"## {file.relative_to(ROOT)}\n\n{show_file(file)}" for file in shown]
    return "\n\n".join([f"# {path.rstrip('/')}", *parts]) + "\n"


def show_file(file: Path) -> str:
    """A file in a fence; of a notebook its cells, with its headings below the page's."""
    if file.suffix != ".ipynb":
        return fenced(file.read_text(), _LANGUAGES[file.suffix])
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(file.read_text())["cells"]]
    return "\n\n".join(
        fenced(text, "python") if kind == "code" else re.sub("^#", "###", text, flags=re.MULTILINE)
        for kind, text in cells
    )


def fenced(text: str, language: str) -> str:
    return f"`````{language}\n{text.rstrip()}\n`````"


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
