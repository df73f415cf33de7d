# SPDX-License-Identifier: Apache-2.0
"""What the tables of transformers do not tell of its classes that transcribe, for each class: a few lines each."""

from vllm_omni.model_executor.transcription_model import GeneratingModel


class KyutaiSpeechToText(GeneratingModel):
    """Writes a token for each frame of its sound, and no more."""

    max_new_tokens = None
