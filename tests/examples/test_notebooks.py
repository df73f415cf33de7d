# SPDX-License-Identifier: Apache-2.0
"""The notebooks are stored without outputs, and run from the first cell to the last in a kernel of their own."""

import base64
import io
import os
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
import soundfile
from nbclient import NotebookClient
from PIL import Image

from tests.examples.running import EXAMPLES

NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))
DATA_URI = re.compile(r'src="data:(\w+/\w+);base64,([A-Za-z0-9+/=]+)"')


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_valid_and_has_no_outputs(path: Path) -> None:
    """Outputs would be megabytes of base64 in each commit, which no review shows; a run proves what they are."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 3 and not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.slow
def test_the_tour(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in [name for name in os.environ if name.startswith("VLLM_")]:  # Of other tests of this process.
        monkeypatch.delenv(name)
    notebook = nbformat.read(EXAMPLES / "notebooks" / "tour.ipynb", as_version=4)
    folder = {"metadata": {"path": str(tmp_path)}}
    cells = NotebookClient(notebook, timeout=240, kernel_name="python3", resources=folder).execute().cells
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error"]

    pages = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", ())]
    embedded = [(kind, base64.b64decode(data)) for page in pages for kind, data in DATA_URI.findall(page)]
    sounds = [soundfile.read(io.BytesIO(file)) for kind, file in embedded if kind == "audio/wav"]
    assert len(sounds) == 3 and all(rate == 24_000 and np.abs(samples).max() > 0.05 for samples, rate in sounds)
    paintings = [np.asarray(Image.open(io.BytesIO(file))) for kind, file in embedded if kind == "image/png"]
    assert [painting.shape for painting in paintings] == [(96, 96, 3)] * 4
    assert "This garden is beautiful but that garden is strange." in pages[0]
    assert "A red circle is left of a blue square." in pages[-2]  # What it sees in the first painting.

    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", ())]
    sizes = [Image.open(io.BytesIO(base64.b64decode(picture))).size for picture in pictures]
    assert sizes[0] == (96, 96) and len(sizes) == 3 and min(sizes[1][0], sizes[2][0]) > 600
    assert sizes[2][1] > sizes[1][1]  # The batch has more rows.
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert "8 together" in printed and "thinker" in printed
