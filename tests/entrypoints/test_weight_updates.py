# SPDX-License-Identifier: Apache-2.0
"""New weights while a pipeline runs: outputs are those of a pipeline that was started with them, or of the old ones."""

import contextlib
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from tests.entrypoints.adapters import write_adapter
from tests.entrypoints.conftest import start
from vllm_omni import OmniLLM, OmniRequestOutput
from vllm_omni.errors import ControlError, InvalidControlError, StageConfigError
from vllm_omni.testing.tiny.diffusion_lora import write_tiny_diffusion_lora
from vllm_omni.testing.tiny_checkpoints import write_tiny_checkpoint

GROUP = "llm"
PROMPTS = ["a hen", "two hens and a fox"]
GREEDY = {"temperature": 0.0, "max_tokens": 8, "logprobs": 1}
TIMEOUT_S = 60.0

Tokens = list[tuple[tuple[int, ...], float | None]]


def with_weights_of(checkpoint: Path, other: Path, folder: Path) -> Path:
    """A copy of a checkpoint with the weights of another one."""
    shutil.copytree(checkpoint, folder)
    for file in other.rglob("*.safetensors"):
        shutil.copy(file, folder / file.relative_to(other))
    return folder


@pytest.fixture(scope="module")
def new_weights(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `tiny_qwen3`, and nothing else."""
    folder = tmp_path_factory.mktemp("weights")
    other = write_tiny_checkpoint("qwen3", folder / "other", seed=1)
    (folder / "new").mkdir()
    shutil.copy(other / "model.safetensors", folder / "new")
    return folder / "new"


@pytest.fixture(scope="module")
def llm(tiny_qwen3: Path) -> Iterator[OmniLLM]:
    with start(tiny_qwen3, max_model_len=256) as llm:
        yield llm


def generate(llm: OmniLLM) -> tuple[Tokens, set[str]]:
    """Tokens with their log-probabilities, and the versions of weights that outputs name."""
    outputs = llm.generate(PROMPTS, [GREEDY], use_tqdm=False)
    tokens = [(tuple(it.outputs[0].token_ids), it.outputs[0].cumulative_logprob) for it in outputs]
    spans = {span.version for it in outputs for span in it.outputs[0].weight_versions or ()}
    assert spans == {stage.weight_version for it in outputs for stage in it.stage_metrics}
    return tokens, spans


def update(llm: OmniLLM, folder: Path, version: str | None) -> None:
    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"weights_path": str(folder)}})
    llm.finish_weight_update(version)


def process(llm: OmniLLM) -> int:
    (stage,) = llm._pipeline.orchestrator._supervisor.stages
    assert stage.process is not None
    return stage.process.pid


def wait_for(llm: OmniLLM, state: str, num_restarts: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while [(it.state, it.num_restarts) for it in llm.health()] != [(state, num_restarts)]:
        assert time.monotonic() < deadline, llm.health()
        time.sleep(0.01)  # seen from outside


def test_outputs_are_those_of_the_new_weights(
    llm: OmniLLM, tiny_qwen3: Path, new_weights: Path, tmp_path: Path
) -> None:
    with start(with_weights_of(tiny_qwen3, new_weights, tmp_path / "whole"), max_model_len=256) as other:
        expected, _ = generate(other)
    before = generate(llm)
    assert before[1] == {"default"} and before[0] != expected
    update(llm, new_weights, "step-1")
    assert generate(llm) == (expected, {"step-1"})
    assert llm.get_weight_version() == "step-1" and llm.health()[0].weight_version == "step-1"
    update(llm, tiny_qwen3, None)
    assert generate(llm) == (before[0], {"step-1"})
    llm.update_weight_version("default")
    assert generate(llm) == before


def test_a_folder_that_does_not_fit_changes_nothing(llm: OmniLLM, new_weights: Path, tmp_path: Path) -> None:
    before = generate(llm)
    tensors = load_file(new_weights / "model.safetensors")
    name = "model.layers.2.self_attn.q_proj.weight"
    save_file(tensors | {name: tensors[name][:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidControlError, match=rf"stage 0 \(text\): {tmp_path}: {name} has the shape"):
        update(llm, tmp_path, "step-1")
    with pytest.raises(InvalidControlError, match="finish_weight_update was called without start_weight_update"):
        llm.finish_weight_update("step-1")
    assert generate(llm) == before


def test_wrong_arguments(llm: OmniLLM, new_weights: Path) -> None:
    info = {"update_info": {"weights_path": str(new_weights)}}
    with pytest.raises(InvalidControlError, match="start_weight_update must be called before"):
        llm.update_weights(info)
    with pytest.raises(InvalidControlError, match="init_info: master_address"):
        llm.init_weight_transfer_engine({"init_info": {"master_address": "trainer"}})
    llm.start_weight_update()
    with pytest.raises(InvalidControlError, match="a weight update is active"):
        llm.start_weight_update()
    for version, message in (("", "weight_version is empty"), (5, r"\$\.new_version"), ("\ud800", "surrogates")):
        with pytest.raises(InvalidControlError, match=message):
            llm.finish_weight_update(version)  # type: ignore[arg-type]
    with pytest.raises(InvalidControlError, match="stage: there is no 'talker'; there are text"):
        llm.update_weights(info, stage="talker")
    llm.start_weight_update()
    with pytest.raises(InvalidControlError, match="update_info is"):
        llm.update_weights({"update_info": {"names": []}})
    llm.start_weight_update()
    llm.update_weights(info, stage="text")
    with pytest.raises(InvalidControlError, match=r"this update has a folder for stage 0 \(text\)"):
        llm.update_weights(info, stage=0)
    for name in ("x" * 5000, "x/" * 5000, "a\0b"):
        llm.start_weight_update()
        with pytest.raises(InvalidControlError, match=r"stage 0 \(text\): "):
            llm.update_weights({"update_info": {"weights_path": f"{new_weights}/{name}"}})
    with pytest.raises(InvalidControlError, match="new_version is empty"):
        llm.update_weight_version("")
    assert llm.get_weight_version() == "default" and generate(llm)[1] == {"default"}


NCCL = {"master_address": "trainer", "master_port": 29500, "rank_offset": 1, "world_size": 2}
TENSORS = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}


@pytest.mark.parametrize("init_info", [NCCL, {"packed": False}, ["trainer"], 5])
@pytest.mark.parametrize("update_info", [TENSORS, {**TENSORS, "ipc_handles": []}, [TENSORS], None])
def test_transfers_of_vllm_are_refused(llm: OmniLLM, init_info: Any, update_info: Any) -> None:
    """Over NCCL and CUDA IPC."""
    reason = "a folder of safetensors, .* not over NCCL or CUDA IPC"
    with pytest.raises(InvalidControlError, match=f"init_info: .*{reason}"):
        llm.init_weight_transfer_engine({"init_info": init_info})
    llm.start_weight_update()
    with pytest.raises(InvalidControlError, match=f"update_info is .*{reason}"):
        llm.update_weights({"update_info": update_info})
    assert llm.get_weight_version() == "default"


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_a_stage_with_vllms_transfer_does_not_start(tiny_qwen3: Path, backend: str) -> None:
    with pytest.raises(StageConfigError, match=r"stage 0 \(text\): engine_args: weight_transfer_config: .*NCCL"):
        OmniLLM(str(tiny_qwen3), weight_transfer_config={"backend": backend})


def test_what_stages_cannot_read_is_refused(llm: OmniLLM) -> None:
    """It would end the orchestrator, or have no answer."""
    wrong: list[tuple[str, tuple[Any, ...], str]] = [
        ("update_weight_version", (5,), r"UpdateWeightVersion: .*\$\.new_version"),
        ("update_weight_version", ("\ud800",), "UpdateWeightVersion: .*surrogates"),
        ("start_profile", (7,), r"StartProfile: .*\$\.profile_prefix"),
        ("reset_prefix_cache", ("yes",), r"ResetPrefixCache: .*\$\.reset_running_requests"),
        ("collective_rpc", ("x", None, (object(),)), "CollectiveRPC: .*object"),
        ("collective_rpc", ("x", None, (1 << 70,)), "CollectiveRPC: .*"),
        ("collective_rpc", ("x", None, (["\ud800"],)), "CollectiveRPC: .*surrogates"),
    ]
    for name, arguments, message in wrong:
        with pytest.raises(InvalidControlError, match=message):
            getattr(llm, name)(*arguments)
    assert generate(llm)[1] == {"default"}


def test_requests_that_run_end_with_the_old_weights(llm: OmniLLM, tiny_qwen3: Path, new_weights: Path) -> None:
    """Others that come meanwhile get the new ones."""
    long = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}
    expected = [it.outputs[0].token_ids for it in llm.generate(PROMPTS, [long], use_tqdm=False)]
    found: list[OmniRequestOutput] = []
    thread = threading.Thread(target=lambda: found.extend(llm.generate(PROMPTS, [long], use_tqdm=False)))
    thread.start()
    while sum(llm._pipeline.orchestrator.activity().values()) < len(PROMPTS):
        pass
    update(llm, new_weights, "step-1")
    thread.join()
    assert [it.outputs[0].token_ids for it in found] == expected
    assert {it.stage_metrics[0].weight_version for it in found} == {"default"}
    assert generate(llm)[1] == {"step-1"}
    update(llm, tiny_qwen3, "default")


def test_what_is_asked_while_an_update_waits(llm: OmniLLM, tiny_qwen3: Path, new_weights: Path) -> None:
    """It pauses again what was resumed, and leaves paused what was paused."""
    long = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}

    def while_it_waits(folder: Path, version: str, ask: Callable[[], None]) -> None:
        threads = [
            threading.Thread(target=llm.generate, args=(PROMPTS, [long]), kwargs={"use_tqdm": False}),
            threading.Thread(target=update, args=(llm, folder, version)),
        ]
        threads[0].start()
        while not any(llm._pipeline.orchestrator.activity().values()):
            pass
        threads[1].start()
        while not llm.is_paused() and threads[1].is_alive():
            pass
        ask()
        for thread in threads:
            thread.join()

    while_it_waits(new_weights, "step-1", llm.resume_generation)
    assert not llm.is_paused() and generate(llm)[1] == {"step-1"}
    while_it_waits(tiny_qwen3, "default", lambda: llm.pause_generation(mode="wait"))
    assert llm.is_paused() and llm.get_weight_version() == "default"
    llm.resume_generation()
    assert generate(llm)[1] == {"default"}


def test_a_stage_that_dies_of_an_update_is_named_and_keeps_the_old_weights(llm: OmniLLM, new_weights: Path) -> None:
    before, num_restarts = generate(llm), llm.health()[0].num_restarts
    llm.start_weight_update()
    llm.update_weights({"update_info": {"weights_path": str(new_weights)}})
    os.kill(process(llm), signal.SIGSTOP)  # So that it cannot answer before it dies.
    errors: list[Exception] = []

    def finish() -> None:
        try:
            llm.finish_weight_update("step-1")
        except ControlError as error:
            errors.append(error)

    thread = threading.Thread(target=finish)
    thread.start()
    while not llm._pipeline.orchestrator._control_calls._calls:
        pass
    os.kill(process(llm), signal.SIGKILL)
    thread.join()
    assert str(errors[0]).startswith("LoadWeights: stage 0 (text) died before it had done it")
    wait_for(llm, "ready", num_restarts + 1)
    assert generate(llm) == before and not llm.is_paused()


def test_the_next_process_has_the_last_weights_or_takes_no_requests(
    llm: OmniLLM, tiny_qwen3: Path, new_weights: Path, tmp_path: Path
) -> None:
    num_restarts = llm.health()[0].num_restarts
    folder = shutil.copytree(new_weights, tmp_path / "weights")
    update(llm, folder, "step-1")
    expected = generate(llm)
    os.kill(process(llm), signal.SIGKILL)
    wait_for(llm, "ready", num_restarts + 1)
    assert generate(llm) == expected

    shutil.rmtree(folder)
    os.kill(process(llm), signal.SIGKILL)
    wait_for(llm, "outdated", num_restarts + 2)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(generate(llm)))
    thread.start()
    update(llm, new_weights, "step-1")
    thread.join()
    assert found == [expected] and llm.health()[0].state == "ready"
    update(llm, tiny_qwen3, "default")


@contextlib.contextmanager
def little_memory(llm: OmniLLM, num_bytes: int) -> Iterator[None]:
    """The stage's process gets no more than this."""
    pid = process(llm)
    before = resource.prlimit(pid, resource.RLIMIT_DATA)
    limit = psutil.Process(pid).memory_info().data + num_bytes
    resource.prlimit(pid, resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_DATA, before)


def test_an_update_without_memory_changes_nothing(llm: OmniLLM, tiny_qwen3: Path, new_weights: Path) -> None:
    before, num_restarts = generate(llm), llm.health()[0].num_restarts
    with little_memory(llm, 1 << 20), pytest.raises(ControlError, match=r"Weights: stage 0 \(text\): .*allocate"):
        update(llm, new_weights, "step-1")
    assert generate(llm) == before and llm.health()[0].num_restarts == num_restarts
    update(llm, new_weights, "step-1")
    assert generate(llm) != before
    update(llm, tiny_qwen3, "default")


def test_memory_of_many_updates(llm: OmniLLM, tiny_qwen3: Path, new_weights: Path) -> None:
    """Each update of these weights would leave 10 MB."""
    expected = generate(llm)
    for _ in range(5):
        update(llm, new_weights, "default")
        update(llm, tiny_qwen3, "default")
    assert generate(llm) == expected
    before = llm.stats()[0].resident_bytes
    for _ in range(20):
        update(llm, new_weights, "default")
        update(llm, tiny_qwen3, "default")
    assert generate(llm) == expected
    assert llm.stats()[0].resident_bytes - before < 20 << 20


@pytest.mark.slow
def test_weights_in_8_bits_are_rounded_again(tiny_qwen3: Path, new_weights: Path, tmp_path: Path) -> None:
    with start(with_weights_of(tiny_qwen3, new_weights, tmp_path / "whole"), max_model_len=256) as other:
        in_float, _ = generate(other)
    with start(tmp_path / "whole", max_model_len=256, quantization="int8") as other:
        expected, _ = generate(other)
    assert expected != in_float
    with start(tiny_qwen3, max_model_len=256, quantization="int8") as llm:
        before = generate(llm)
        update(llm, new_weights, "step-1")
        assert generate(llm) == (expected, {"step-1"})
        update(llm, tiny_qwen3, "default")
        assert generate(llm) == before


@pytest.mark.slow
def test_adapters_are_of_the_new_weights(tiny_qwen3: Path, new_weights: Path, tmp_path: Path) -> None:
    """A loaded one, that is used again without being named again, and one that comes afterwards."""
    adapters = [
        LoRARequest(f"style{seed}", seed, str(write_adapter(tiny_qwen3, tmp_path / str(seed), seed))) for seed in (1, 2)
    ]

    def with_adapters(llm: OmniLLM) -> list[Any]:
        found = [llm.generate(PROMPTS, [GREEDY], use_tqdm=False, lora_request=it) for it in (None, *adapters)]
        return [[(it.outputs[0].token_ids, it.outputs[0].cumulative_logprob) for it in outputs] for outputs in found]

    arguments: dict[str, Any] = {"max_model_len": 256, "enable_lora": True}
    with start(with_weights_of(tiny_qwen3, new_weights, tmp_path / "whole"), **arguments) as other:
        expected = with_adapters(other)
    assert expected[0] != expected[1] != expected[2]
    with start(tiny_qwen3, **arguments) as llm:
        llm.generate(PROMPTS, [GREEDY], use_tqdm=False, lora_request=adapters[0])
        update(llm, new_weights, "step-1")
        assert with_adapters(llm) == expected


@pytest.mark.slow
def test_adapters_of_a_painter_are_of_the_new_weights(tiny_diffusion: Callable[[str], Path], tmp_path: Path) -> None:
    base, other = tiny_diffusion("z_image"), write_tiny_checkpoint("z_image", tmp_path / "other", seed=1)
    new = with_weights_of(base, other, tmp_path / "new")
    adapter = LoRARequest("style", 1, str(write_tiny_diffusion_lora(base, tmp_path / "lora", 3)))

    def paint(llm: OmniLLM, lora_request: LoRARequest | None) -> torch.Tensor:
        params = [{**PICTURE, "output_format": "np"}]
        (output,) = llm.generate(["a hen"], params, use_tqdm=False, lora_request=lora_request)
        return output.multimodal_output["image"]

    with OmniLLM(str(new)) as llm:
        expected = paint(llm, adapter)
        assert not torch.equal(expected, paint(llm, None))
    with OmniLLM(str(base)) as llm:
        assert not torch.equal(paint(llm, adapter), expected)
        update(llm, new, "step-1")
        assert torch.equal(paint(llm, adapter), expected)


@pytest.mark.slow
def test_names_of_an_adapter_in_training_are_refused(tiny_diffusion: Callable[[str], Path], tmp_path: Path) -> None:
    """A trainer of adapters has to merge them, or to give the adapter alone."""
    base = tiny_diffusion("z_image")
    (file,) = (base / "transformer").glob("*.safetensors")
    tensors = {name.replace(".to_q.weight", ".to_q.base_layer.weight"): it for name, it in load_file(file).items()}
    (tmp_path / "transformer").mkdir()
    save_file(tensors, tmp_path / "transformer" / file.name)
    with OmniLLM(str(base)) as llm, pytest.raises(InvalidControlError, match=r"to_q.base_layer.weight is no tensor of"):
        update(llm, tmp_path, "step-1")


MODELS = ["qwen3_omni_moe", "csm", "qwen3_tts", "higgs_audio_v2", "vibevoice", "janus", "z_image"]
PICTURE = {"num_inference_steps": 2, "seed": 1, "height": 32, "width": 32}
CHAT = "<|im_start|>user\na hen and a fox<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_all_that_is_made_of_weights_is_made_again(name: str, tmp_path: Path) -> None:
    """Tables, packed copies, states of feedback, filters of vocoders, networks of diffusion."""
    base, other = (write_tiny_checkpoint(name, tmp_path / str(seed), seed=seed) for seed in (0, 1))
    new = with_weights_of(base, other, tmp_path / "new")
    is_diffusion = (base / "model_index.json").exists()
    arguments: dict[str, Any] = {} if is_diffusion else {"max_model_len": 512}

    def run(llm: OmniLLM) -> list[Any]:
        greedy = {"temperature": 0.0, "max_tokens": 16, "seed": 3}
        params = [greedy if stage.kind.is_autoregressive else None for stage in llm.config.stage_args]
        prompt = CHAT if "omni" in name else "a hen and a fox"
        outputs = llm.generate([prompt], [PICTURE] if is_diffusion else params, use_tqdm=False)
        assert {stage.weight_version for stage in outputs[0].stage_metrics} == {llm.get_weight_version()}
        return [([it.token_ids for it in output.outputs], output.multimodal_output) for output in outputs]

    def is_close(tensor: torch.Tensor, other: torch.Tensor) -> bool:
        # Which windows of a sound are computed at once depends on time, and rounds its last digit.
        return tensor.shape == other.shape and torch.allclose(tensor, other, rtol=0, atol=1e-5)

    def are_equal(first: list[Any], second: list[Any]) -> bool:
        return all(
            tokens == others and all(is_close(tensor, tensors[key]) for key, tensor in found.items())
            for (tokens, found), (others, tensors) in zip(first, second, strict=True)
        )

    def open_pipeline(model: Path) -> OmniLLM:
        return OmniLLM(str(model)) if is_diffusion else start(model, **arguments)

    with open_pipeline(new) as llm:
        expected = run(llm)
    with open_pipeline(base) as llm:
        before = run(llm)
        assert not are_equal(before, expected)
        update(llm, new, "step-1")
        assert are_equal(run(llm), expected)
        update(llm, base, "step-2")
        assert are_equal(run(llm), before)
