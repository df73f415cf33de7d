# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints: complete, reproducible, never written over other files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoProcessor, AutoTokenizer

from vllm_omni.testing.media import make_prompt
from vllm_omni.testing.tiny.qwen2_5_omni import SPEAKERS
from vllm_omni.testing.tiny.tokenizer import QWEN2_5, QWEN3, ROLES, WORDS, Dialect, make_tokenizer
from vllm_omni.testing.tiny_checkpoints import TINY_CHECKPOINTS, main, write_tiny_checkpoint

QWEN2_5_OMNI = ("tiny_qwen2_5_omni", QWEN2_5)
QWEN3_OMNI = ("tiny_qwen3_omni_moe", QWEN3)
FIXED_BYTES = {"hunyuan_video_15": 4 * 2048 * (64 + 2048 + 64)}
"""Of layers whose sizes diffusers has in its code: the projection of glyph states, by way of 2048 channels."""


@pytest.fixture
def omni(request: pytest.FixtureRequest) -> Path:
    """The checkpoint of the fixture that the test's parameter names."""
    return request.getfixturevalue(request.param)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    "name", [name if name == "qwen3" else pytest.param(name, marks=pytest.mark.slow) for name in TINY_CHECKPOINTS]
)
def test_every_byte_depends_on_the_seed_only(name: str, tiny_diffusion: Callable[[str], Path], tmp_path: Path) -> None:
    """The first one is that of all tests of this run, which another process may have written."""
    first, again = (contents(path) for path in (tiny_diffusion(name), write_tiny_checkpoint(name, tmp_path / "again")))

    assert again == {file: data for file, data in first.items() if file in again}
    if name in ("qwen3", "z_image"):  # Tests of new weights need it of others.
        other = contents(write_tiny_checkpoint(name, tmp_path / "other", seed=1))
        weights = {file for file in again if file.endswith((".safetensors", ".pt"))}
        assert {file for file in again if other[file] != again[file]} == weights != set()
    size = sum(map(len, again.values())) - FIXED_BYTES.get(name, 0)
    assert size < (5e6 if "model_index.json" in again else 10e6)


@pytest.mark.parametrize("omni, dialect, patch", [(*QWEN2_5_OMNI, 14), (*QWEN3_OMNI, 16)], indirect=["omni"])
def test_processors_load_and_have_their_tokens(omni: Path, dialect: Dialect, patch: int) -> None:
    processor = AutoProcessor.from_pretrained(omni)

    assert processor.image_processor.patch_size == processor.video_processor.patch_size == patch
    assert processor.feature_extractor.sampling_rate == 16_000
    assert {name: getattr(processor, name) for name in dialect.named_tokens} == dialect.named_tokens


def test_the_configuration_names_the_tokenizers_ids(tiny_qwen3_omni_moe: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_qwen3_omni_moe)
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3_omni_moe)

    assert tokenizer.convert_ids_to_tokens(config.user_token_id) == "user"
    assert tokenizer.convert_ids_to_tokens(config.im_end_token_id) == tokenizer.eos_token == "<|im_end|>"
    for token_config in (config.thinker_config, config.talker_config):
        assert tokenizer.convert_ids_to_tokens(token_config.image_token_id) == "<|image_pad|>"
    assert config.thinker_config.text_config.vocab_size > len(tokenizer)


def test_speakers_differ_in_every_field(tiny_qwen2_5_omni: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2_5_omni)
    speakers = torch.load(tiny_qwen2_5_omni / "spk_dict.pt", weights_only=True)

    first_tokens = tokenizer.convert_ids_to_tokens([speaker["bos_token"] for speaker in speakers.values()])
    assert dict(zip(speakers, first_tokens, strict=True)) == SPEAKERS
    for part in ("cond", "ref_mel"):
        assert len({speaker[part].sum().item() for speaker in speakers.values()}) == len(speakers)


@pytest.mark.parametrize("dialect", [QWEN2_5, QWEN3])
def test_the_tokenizer_is_lossless_and_has_tokens_for_roles(dialect: Dialect) -> None:
    tokenizer = make_tokenizer(dialect)
    text = "Où est ma 猫? 12 cats\n\tand\x00 more"

    assert tokenizer.decode(tokenizer.encode(text)) == text
    for token in (*ROLES, *dialect.special_tokens, *(" " + word for word in WORDS)):
        assert len(tokenizer.encode(token)) == 1, token


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
@pytest.mark.parametrize("omni, dialect", [QWEN2_5_OMNI, QWEN3_OMNI], indirect=["omni"])
def test_the_chat_template_renders_media_before_text(kind: str, omni: Path, dialect: Dialect) -> None:
    prompt = make_prompt(omni, kind, question="What is it?")["prompt"]

    tokens = dialect.named_tokens
    around = "audio" if kind == "audio" else "vision"
    media = tokens[f"{around}_bos_token"] + tokens[f"{kind}_token"] + tokens[f"{around}_eos_token"]
    assert prompt.split("<|im_start|>")[2] == f"user\n{media}What is it?<|im_end|>\n"
    assert prompt.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("kind", ["name", "size"])
def test_errors_for_unknown_names_suggest_the_nearest(kind: str, tmp_path: Path) -> None:
    name, size = ("qwen3_omni_mo", "default") if kind == "name" else ("qwen3", "larg")
    with pytest.raises(ValueError, match=r"did you mean '(qwen3_omni_moe|large)'\?.*Known: "):
        write_tiny_checkpoint(name, tmp_path / "new", size=size)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("mine")

    with pytest.raises(SystemExit, match="2"):
        main(["qwen3", str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err
    assert contents(tmp_path) == {"config.json": b"mine"}

    assert main(["qwen3", str(tmp_path), "--force"]) == 0
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert "MB in" in capsys.readouterr().out


def test_the_printed_size_includes_subfolders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["z_image", str(tmp_path)]) == 0

    megabytes = sum(map(len, contents(tmp_path).values())) / 1e6
    assert megabytes > 1
    assert f"{megabytes:.1f} MB in" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen2_5_omni", "qwen3_omni_moe", "flux", "qwen_image", "stable_diffusion_3", "z_image"]
)
def test_the_large_size_is_large(name: str, tmp_path: Path) -> None:
    write_tiny_checkpoint(name, tmp_path, size="large")

    assert 20e6 < max(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) < 300e6
