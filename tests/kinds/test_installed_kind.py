# SPDX-License-Identifier: Apache-2.0
"""A kind of stage that an installed package adds: its arguments, its checks, and a pipeline that runs it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_omni import OmniLLM
from vllm_omni.config.loader import load_pipeline_config
from vllm_omni.errors import StageConfigError
from vllm_omni.model_packages import find_models

PACKAGE = '''
from vllm_omni.config.stage import StageKind
from vllm_omni.errors import StageConfigError
from vllm_omni.model_packages import ModelPackage

MODELS = ModelPackage(stage_kinds={"echo": "echo_kind:Echo"})


class Echo(StageKind):
    """Repeats the prompt, as often as an engine argument says."""

    gives_text = True

    def known_arguments(self):
        return {"times"}

    def check(self):
        if self.stage.engine_args.get("times", 1) < 1:
            raise StageConfigError(f"{self.stage.label}: engine_args.times: must be 1 or more")

    def make_engine(self, model, outbox, workers=None, log_stats=False):
        from vllm_omni.stage.engines.function import FunctionStageEngine, PlainFunction

        times = self.stage.engine_args["times"]
        echo = PlainFunction(self.stage, model, lambda request, sources: {"text": times * request.prompt})
        return FunctionStageEngine(outbox, echo)
'''

STAGES = """
stage_args:
  - {stage_id: 0, engine_type: echo, engine_args: {model_stage: echo, times: 1},
     final_output: true, final_output_type: text}
"""


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stage configuration of the kind, whose package is installed."""
    info = tmp_path / "echo_kind-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-kind\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm_omni.models]\necho = echo_kind:MODELS\n")
    (tmp_path / "echo_kind.py").write_text(PACKAGE)
    (tmp_path / "stages.yaml").write_text(STAGES)
    monkeypatch.syspath_prepend(str(tmp_path))
    find_models.cache_clear()
    yield tmp_path / "stages.yaml"
    find_models.cache_clear()
    sys.modules.pop("echo_kind", None)


def test_its_checks_and_the_kinds_of_this_package_remain(stages: Path) -> None:
    kind = load_pipeline_config(stages).stages[0].kind
    assert (type(kind).__name__, kind.name, kind.has_function) == ("Echo", "echo", False)
    stages.write_text(STAGES.replace("times: 1", "times: 0"))
    with pytest.raises(StageConfigError, match=r"stage 0 \(echo\): engine_args.times: must be 1 or more"):
        load_pipeline_config(stages)
    stages.write_text(STAGES.replace("engine_type: echo", "engine_type: eco"))
    known = r"'eco' \(known here: AR, DiT, echo, fake, function, generation, transformers\)"
    with pytest.raises(StageConfigError, match=known):
        load_pipeline_config(stages)
    stages.write_text(STAGES.replace("engine_type: echo", "engine_type: echo, function: os.getcwd"))
    with pytest.raises(StageConfigError, match="engine_type echo has no function"):
        load_pipeline_config(stages)


@pytest.mark.parametrize(
    ("line", "other", "problem"),
    [
        ("class Echo(StageKind)", "class Other(StageKind)", "cannot be imported"),
        ("class Echo(StageKind)", "class Echo", "does not extend StageKind"),
    ],
)
def test_a_wrong_class_is_named(stages: Path, line: str, other: str, problem: str) -> None:
    stages.with_name("echo_kind.py").write_text(PACKAGE.replace(line, other))
    with pytest.raises(StageConfigError, match=f"engine_type: 'echo' is echo_kind:Echo, which {problem}"):
        load_pipeline_config(stages)


def test_without_the_package_the_kind_is_unknown(stages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(stages.parent)])
    find_models.cache_clear()
    with pytest.raises(StageConfigError, match=r"Invalid enum value 'echo' \(known here: AR, DiT, fake, function"):
        load_pipeline_config(stages)


@pytest.mark.slow
def test_a_pipeline_runs_it(stages: Path) -> None:
    with pytest.raises(StageConfigError, match="engine argument 'time'; did you mean 'times'"):
        OmniLLM("", str(stages), time=3)
    with OmniLLM("", str(stages), times=3) as llm:
        (output,) = llm.generate("ab", use_tqdm=False)
    assert output.outputs[0].text == "ababab"
