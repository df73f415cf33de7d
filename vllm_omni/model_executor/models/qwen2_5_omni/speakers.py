# SPDX-License-Identifier: Apache-2.0
"""The voices of a Qwen2.5-Omni checkpoint, in `spk_dict.pt` beside its weights.

Stage input processors read the names, the talker a token, and the vocoder the conditioning.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.hub import cached_file

SPEAKERS_FILE = "spk_dict.pt"
DEFAULT_SPEAKER = "chelsie"


@dataclass(frozen=True, slots=True)
class Speaker:
    """
    Attributes:
        bos_token_id: The thinker's token that the talker reads before the reply.
        cond: float32 `[1, enc_emb_dim]`.
        ref_mel: float32 `[1, frames, mel_dim]`.
    """

    bos_token_id: int
    cond: torch.Tensor
    ref_mel: torch.Tensor


def load_speakers(model: str | Path, revision: str | None = None) -> dict[str, Speaker]:
    """All voices of a checkpoint by their names in lower case, in the order of the file.

    Args:
        model: A local folder, or the checkpoint's name on the hub, from where the file is downloaded once.

    Raises:
        OSError: The file does not exist or cannot be downloaded; the message has its location.
        ValueError: The file has no voice.
    """
    path = cached_file(str(model), SPEAKERS_FILE, revision=revision)
    assert path is not None  # it raises
    entries: dict[str, dict[str, Any]] = torch.load(path, map_location="cpu", weights_only=True)
    if not entries:
        raise ValueError(f"{path} has no voice")
    return {name.lower(): _as_speaker(entry) for name, entry in entries.items()}


def _as_speaker(entry: dict[str, Any]) -> Speaker:
    return Speaker(bos_token_id=int(entry["bos_token"]), cond=entry["cond"].float(), ref_mel=entry["ref_mel"].float())
