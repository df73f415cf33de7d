# SPDX-License-Identifier: Apache-2.0
"""The lines of values in a stage configuration file."""

from pathlib import Path

from vllm_omni.entrypoints.cli.config_values import locate_values

TEXT = """\
# A comment.
stage_args:
  - stage_id: 7
    engine_args:
      model_stage: talker   # named here
      compilation_config: {mode: 0}

  - engine_args: {dtype: float32}
    stage_id: 3
runtime:
  edges:
    - {from: 3, to: 7}
"""


def test_lines_by_stage_id_and_key(tmp_path: Path) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text(TEXT)

    lines = locate_values(path)

    assert lines["stage_args", 7, "engine_args", "model_stage"] == 5
    assert lines["stage_args", 7, "engine_args", "compilation_config", "mode"] == 6
    assert lines["stage_args", 3, "engine_args", "dtype"] == 8
    assert lines["runtime", "edges", 0, "to"] == 12
    assert ("stage_args", 3, "runtime") not in lines
