# SPDX-License-Identifier: Apache-2.0
"""Draws the Mermaid diagrams of the documentation: `python scripts/diagrams.py`.

Needs Chromium (`make programs`), npm, and a network for it: Mermaid is a library for browsers. Writes
docs/figures/diagrams/*.svg, which scripts/docs_hooks.py puts in place of the diagrams' sources, so that the site needs
neither the library nor a network. A file has the name of its page and a digest of its source.
"""

import hashlib
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
FOLDER = DOCS / "figures" / "diagrams"
FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)

MERMAID = "mermaid@12.3.0"
LIBRARY = "package/dist/mermaid.min.js"
# Mermaid computes with colours; these stand for the site's, which are others in the dark.
COLOURS = {
    "#010101": "var(--md-default-fg-color)",
    "#020202": "var(--md-default-fg-color--light)",
    "#030303": "var(--md-code-bg-color)",
    "#040404": "var(--md-default-fg-color--lightest)",
    "#050505": "var(--md-default-bg-color)",
}
TEXT, LINE, FILL, GROUP, PAGE = COLOURS
SETTINGS = {
    "startOnLoad": False,
    "htmlLabels": False,
    "deterministicIds": True,
    "theme": "base",
    "fontFamily": "Arial, sans-serif",
    "flowchart": {"useMaxWidth": True},
    "sequence": {"useMaxWidth": True, "mirrorActors": False},
    "themeVariables": {
        "fontSize": "14px", "useGradient": False, "dropShadow": "none",
        "primaryColor": FILL, "primaryTextColor": TEXT, "primaryBorderColor": LINE,
        "lineColor": LINE, "textColor": TEXT, "titleColor": TEXT, "nodeTextColor": TEXT, "clusterBkg": GROUP,
        "clusterBorder": LINE, "edgeLabelBackground": PAGE, "actorBkg": FILL, "actorBorder": LINE,
        "actorTextColor": TEXT, "actorLineColor": LINE, "signalColor": LINE, "signalTextColor": TEXT,
    },
}  # fmt: skip


def find_diagrams() -> dict[Path, str]:
    """The sources of all diagrams, by the files of their pictures."""
    pages = sorted(DOCS.rglob("*.md"))
    return {picture(page, source): source for page in pages for source in FENCE.findall(page.read_text())}


def picture(page: Path, source: str) -> Path:
    return FOLDER / f"{page.stem}-{hashlib.sha256(source.encode()).hexdigest()[:8]}.svg"


def main() -> None:
    from playwright.sync_api import sync_playwright

    FOLDER.mkdir(exist_ok=True)
    found = find_diagrams()
    for old in set(FOLDER.glob("*.svg")) - found.keys():
        old.unlink()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.add_script_tag(path=download(Path(folder)))
        page.evaluate("settings => mermaid.initialize(settings)", SETTINGS)
        for file, source in found.items():
            svg = page.evaluate("async given => (await mermaid.render(...given)).svg", [file.stem, source])
            file.write_text(legible(with_colours(svg)) + "\n")
            print(file.relative_to(DOCS.parent))
        browser.close()


def download(folder: Path) -> Path:
    subprocess.run(["npm", "pack", "--silent", MERMAID], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as opened:
        opened.extract(LIBRARY, folder, filter="data")
    return folder / LIBRARY


def with_colours(svg: str) -> str:
    for stand_in, colour in COLOURS.items():
        svg = re.sub(stand_in, colour, svg, flags=re.IGNORECASE)
    return svg


def legible(svg: str) -> str:
    """With a least width: on a phone a wide diagram is scrolled."""
    return re.sub(r"max-width: ([\d.]+px);", r"max-width: \1; min-width: min(\1, 600px);", svg, count=1)


if __name__ == "__main__":
    main()
