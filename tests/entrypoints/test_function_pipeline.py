# SPDX-License-Identifier: Apache-2.0
"""A pipeline of functions in a module on the caller's path: no checkpoint, nothing to install."""

from pathlib import Path

import pytest

from vllm_omni import OmniLLM

pytestmark = pytest.mark.slow

FUNCTIONS = """
def upper(request, sources):
    return {"text": request.prompt.upper()}

def twice(request, sources):
    (source,) = sources.values()
    return {"text": 2 * source.completions[0].text + "!" * request.priority}
"""

STAGES = """
stage_args:
  - {stage_id: 0, engine_type: function, function: functions_of_this_test.upper}
  - {stage_id: 1, engine_type: function, function: functions_of_this_test.twice, engine_input_source: [0],
     final_output: true, final_output_type: text}
"""


def test_stages_import_modules_on_the_callers_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "functions_of_this_test.py").write_text(FUNCTIONS)
    (tmp_path / "stages.yaml").write_text(STAGES)
    monkeypatch.syspath_prepend(str(tmp_path))
    with OmniLLM("", str(tmp_path / "stages.yaml")) as llm:
        outputs = llm.generate(["a", "b"], use_tqdm=False, priority=[0, 2])
        with pytest.raises(ValueError, match="priority has 1 entries for 2 prompts"):
            llm.generate(["a", "b"], use_tqdm=False, priority=[1])
    assert [output.outputs[0].text for output in outputs] == ["AA", "BB!!"]
