# SPDX-License-Identifier: Apache-2.0
"""Plain vLLM behaves the same with the plugin as without it, and finds our architectures with it."""

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

from vllm_omni import plugin
from vllm_omni.model_executor.registry import OMNI_CONFIGS, OMNI_MODELS
from vllm_omni.vllm_requirement import require_vllm

PLAIN_VLLM = """
import json, sys
from vllm import LLM, ModelRegistry, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=16 << 20,
        disable_log_stats=True,
    )
    prompts = [{"prompt_token_ids": list(range(start, start + 20))} for start in (3, 40)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    json.dump({
        "tokens": [output.outputs[0].token_ids for output in outputs],
        "architectures": sorted(ModelRegistry.get_supported_archs()),
        "ours": sorted(name for name in sys.modules if name.startswith("vllm_omni")),
    }, open(sys.argv[2], "w"))
"""


def test_the_entry_point_is_installed():
    (entry_point,) = [e for e in metadata.entry_points(group="vllm.general_plugins") if e.dist.name == "vllm-omni"]
    assert entry_point.load() is plugin.register


@pytest.mark.slow
def test_plain_vllm_gives_the_same_tokens_with_and_without_the_plugin(tiny_qwen3, tmp_path):
    folders = [tmp_path / "without", tmp_path / "with"]
    started = [start_plain_vllm(tiny_qwen3, folders[0], VLLM_PLUGINS=""), start_plain_vllm(tiny_qwen3, folders[1])]
    try:
        without, with_plugin = (tokens_of(process, folder) for process, folder in zip(started, folders, strict=True))
    finally:
        for process in started:
            process.kill()

    assert with_plugin["tokens"] == without["tokens"]
    assert [len(tokens) for tokens in without["tokens"]] == [16, 16]
    assert without["ours"] == []
    assert set(with_plugin["architectures"]) - set(without["architectures"]) == set(OMNI_MODELS)
    names = ("errors", "model_packages", "plugin", "version", "vllm_requirement")
    light = {"vllm_omni", *(f"vllm_omni.{name}" for name in names)}
    light |= {f"vllm_omni.model_executor{name}" for name in ("", ".lazy_model", ".registry")}
    for path in OMNI_CONFIGS.values():
        parts = path.partition(":")[0].split(".")
        light |= {".".join(parts[:number]) for number in range(1, len(parts) + 1)}
    light |= {"vllm_omni_playground", "vllm_omni_talk"}
    assert set(with_plugin["ours"]) == light, "the plugin imports more than it needs into every vLLM process"


def test_register_can_be_called_again(caplog):
    from vllm import ModelRegistry

    plugin.register()
    registered = dict(ModelRegistry.models)
    plugin.register()
    assert ModelRegistry.models == registered
    assert not [record for record in caplog.records if record.name == plugin.logger.name]


@pytest.mark.parametrize("architecture", OMNI_MODELS)
def test_each_architecture_names_a_class_that_exists(architecture):
    from vllm import ModelRegistry

    plugin.register()
    assert ModelRegistry._try_load_model_cls(architecture) is not None, OMNI_MODELS[architecture]


def test_an_unsupported_vllm_is_not_changed(monkeypatch, caplog):
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.31.0" if "vllm" in name else version(name))
    require_vllm.cache_clear()
    from vllm import ModelRegistry

    monkeypatch.setattr(ModelRegistry, "models", {})
    monkeypatch.setattr(plugin.logger, "handlers", [caplog.handler])  # vLLM's loggers may not propagate.
    plugin.register()
    require_vllm.cache_clear()
    assert ModelRegistry.models == {}
    assert "needs vLLM 0.32" in caplog.text


def start_plain_vllm(model, folder, **environment) -> subprocess.Popen:
    folder.mkdir()
    script = folder / "plain_vllm.py"
    script.write_text(PLAIN_VLLM)
    clean = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    environment = clean | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | environment
    return subprocess.Popen([sys.executable, script, model, folder / "answer.json"], env=environment)


def tokens_of(process, folder) -> dict:
    assert process.wait() == 0
    return json.loads((folder / "answer.json").read_text())
