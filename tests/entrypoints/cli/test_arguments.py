# SPDX-License-Identifier: Apache-2.0
"""Flags for single stages."""

import json

import pytest

from vllm_omni.entrypoints.cli.arguments import fold_stage_flags


def overrides(*arguments: str) -> dict:
    (folded,) = fold_stage_flags(arguments)
    return json.loads(folded.removeprefix("--stage="))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("16", 16),
        ("0.5", 0.5),
        ("1e-3", 0.001),
        ("true", True),
        ("null", None),
        ("0,1", "0,1"),
        ('"4"', "4"),
        ("20GiB", "20GiB"),
        ("-1", -1),
        ("[a, b]", ["a", "b"]),
        ("{mode: 0}", {"mode": 0}),
    ],
)
def test_values_are_typed_as_in_a_stage_configuration(text: str, value: object) -> None:
    assert overrides("--stage.talker.runtime.key", text) == {"talker": {"runtime": {"key": value}}}
    assert overrides(f"--stage.talker.runtime.key={text}") == {"talker": {"runtime": {"key": value}}}


def test_stage_flags_are_folded_and_other_words_are_kept() -> None:
    line = [
        "M",
        "--stage.0.max-num-seqs",
        "3",
        "--port",
        "1",
        "--stage.talker.engine-args.seed=2",
        "--stage.0.dtype=auto",
    ]

    *others, folded = fold_stage_flags(line)

    assert others == ["M", "--port", "1"]
    assert json.loads(folded.removeprefix("--stage=")) == {
        "0": {"engine_args": {"max_num_seqs": 3, "dtype": "auto"}},
        "talker": {"engine_args": {"seed": 2}},
    }


def test_a_function_is_a_key_of_the_stage() -> None:
    assert overrides("--stage.tts.function", "package.Voice") == {"tts": {"function": "package.Voice"}}


def test_a_nested_key_is_a_mapping() -> None:
    assert overrides("--stage.a.engine_args.compilation_config.mode", "0") == {
        "a": {"engine_args": {"compilation_config": {"mode": 0}}}
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--stage.talker.seed"], r"--stage\.talker\.seed needs a value"),
        (["--stage.talker.seed", "--port", "1"], "needs a value"),
        (["--stage.talker", "3"], "names no key"),
        (["--stage.talker..seed", "3"], "is incomplete"),
        (["--stage.talker.runtime", "3"], "names no key"),
        (["--stage.talker.seed={"], "is not YAML"),
        (["--stage.talker.seed={a: 1, a: 2}"], "the key 'a' is given twice"),
        (["--stage.a.max-num-seqs=1", "--stage.a.max_num_seqs=2"], r"--stage\.a\.max_num_seqs is given twice"),
    ],
)
def test_wrong_stage_flags_are_refused(line: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fold_stage_flags(line)
