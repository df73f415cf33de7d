# SPDX-License-Identifier: Apache-2.0
"""The page of `vllm-omni demo`: verdicts, the timeline, and what comes next."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vllm_omni.entrypoints.cli.demo_results import DemoResult, write_page
from vllm_omni.metrics.stats import StageMetrics
from vllm_omni.outputs import OmniRequestOutput

STAGES = [
    StageMetrics(stage_id=0, name="llm", arrival=10.0, first_output=10.5, finished=12.0),
    StageMetrics(stage_id=1, name="voice", arrival=11.0, finished=14.0),
]
OUTPUT = cast(OmniRequestOutput, SimpleNamespace(stage_metrics=STAGES))


def result(**values: Any) -> DemoResult:
    defaults = {"model": "talk", "title": "An answer", "text": "a < b", "note": "A note.", "verdict": "right"}
    return DemoResult(**{**defaults, "picture": None, "sound": "talk.wav", "output": OUTPUT, **values})


def test_the_page_explains_itself_and_names_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni.entrypoints.cli.demo_results.find_spec", lambda name: object())
    page = write_page(tmp_path, [result(), result(model="another")])
    text = page.read_text()
    legend = text[text.index("class=legend") : text.index("<article>")]
    for word in ("waits", "works", "right", "wrong", "not judged", "cut short"):
        assert word in legend
    assert "a &lt; b" in text and "width=device-width" in text
    assert 'class=waits style="margin-left:0.0%;width:12.5%"></i><i class=works style="width:37.5%"' in text
    assert 'class=waits style="margin-left:25.0%;width:75.0%"></i><i class=works style="width:0.0%"' in text
    assert re.search(r"<code>\S*bin/vllm serve talk --omni --playground</code>", text)
    assert 'href="http://localhost:8000/playground"' in text
    (quickstart,) = re.findall(r'href="([^"]*quickstart\.md)"', text)
    assert (page.parent / quickstart).is_file()


def test_without_the_playground_the_next_page_is_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_omni.entrypoints.cli.demo_results.find_spec", lambda name: None)
    text = write_page(tmp_path, [result(model="shapes")]).read_text()
    assert "vllm serve shapes --omni</code>" in text and 'href="http://localhost:8000/docs"' in text


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits(tmp_path: Path, width: int) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright (extra `test`)")
    if shutil.which("chromium") is None:
        pytest.skip("needs Chromium (`make programs`)")
    results = [result(), result(text="word" * 40, verdict="not judged"), result(picture="picture.png")]
    page = write_page(tmp_path, results)
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": width, "height": 800})
        view.goto(page.as_uri())
        assert view.evaluate("document.documentElement.scrollWidth") <= width
        bars = view.locator(".bar").first.bounding_box()
        assert bars["width"] > 100
        browser.close()
