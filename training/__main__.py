# SPDX-License-Identifier: Apache-2.0
"""Trains the shipped models, part after part, and writes their checkpoints.

    python -m training [PART ...] [--folder FOLDER]

Parts: vocoder hearing thinker talker vae painter. Each resumes where it stopped; parts that are done cost nothing.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from transformers import AutoProcessor, PreTrainedTokenizerFast, Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from training import codec, data, painter, talker, thinker
from training.config import make_config, save_processor
from training.speech import SPEAKERS
from training.tokenizer import make_embeddings, make_tokenizer

STEPS = {
    "vocoder": 5_000, "reading": 6_000, "hearing": 5_000, "thinker": 4_000, "talker": 10_000, "vae": 3_000,
    "painter": 6_000,
}  # fmt: skip
PARTS = ("vocoder", "hearing", "thinker", "talker", "vae", "painter")
NUM_PICTURES = 24_000


class Trainer:
    """The parts, each with what it needs of the others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: PreTrainedTokenizerFast = make_tokenizer()
        self._config = make_config(self._tokenizer)

    def vocoder(self) -> None:
        recordings = data.spoken(self._folder)
        quantizer = self._quantizer()
        waves = [recordings[index] for index in range(len(recordings))]
        vocoder = Qwen3OmniMoeCode2Wav(self._config.code2wav_config)
        codec.train_vocoder(self._folder, vocoder, waves, [quantizer.encode(w) for w in waves], STEPS["vocoder"])

    def thinker(self) -> None:
        """Reading and hearing are learned apart, then together."""
        trainer = self._thinker_trainer()
        thinker.train_reading(self._folder, trainer, STEPS["reading"])
        bank = thinker.SpeechBank(data.heard(self._folder))
        thinker.train_hearing(self._folder, trainer, bank, STEPS["hearing"])
        thinker.train(self._folder, trainer, bank, STEPS["thinker"])

    def hearing(self) -> None:
        bank = thinker.SpeechBank(data.heard(self._folder))
        thinker.train_hearing(self._folder, self._thinker_trainer(), bank, STEPS["hearing"])

    def _thinker_trainer(self) -> thinker.ThinkerTrainer:
        save_processor(self._tokenizer, self._config, self._folder / "processor")
        processor = AutoProcessor.from_pretrained(self._folder / "processor")
        model = Qwen3OmniMoeThinkerForConditionalGeneration(self._config.thinker_config)
        embeddings = self._embeddings()
        model.get_input_embeddings().weight.data.copy_(embeddings)
        model.get_input_embeddings().requires_grad_(False)
        model.lm_head.weight.data.copy_(0.2 * embeddings)  # It learns sooner to repeat what it reads.
        return thinker.ThinkerTrainer(model, processor, self._tokenizer)

    def talker(self) -> None:
        recordings, quantizer = data.spoken(self._folder), self._quantizer()
        names = {voice: name for name, voice in SPEAKERS.items()}
        utterances = [
            talker.Utterance(text, names[voice], quantizer.encode(recordings[index]))
            for index, (voice, text) in enumerate(recordings.labels)
        ]
        trainer = talker.TalkerTrainer(
            talker.make_talker(self._config), self._config, self._embeddings(), self._tokenizer
        )
        talker.train(self._folder, trainer, utterances, STEPS["talker"])

    def vae(self) -> None:
        painter.train_vae(self._folder, painter.make_vae(), STEPS["vae"])

    def painter(self) -> None:
        vae = painter.make_vae()
        vae.load_state_dict(torch.load(self._folder / "vae.pt")["models"][0])
        latents, prompts = painter.encode(vae, random.Random("pictures"), NUM_PICTURES)
        vae.register_to_config(scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean()))
        scaled = (latents - latents.mean()) / latents.std()
        text_encoder = painter.make_text_encoder(self._tokenizer)
        pipeline = painter.make_pipeline(vae, text_encoder, self._tokenizer, painter.make_transformer())
        painter.train_transformer(self._folder, pipeline, scaled, prompts, STEPS["painter"])

    def _embeddings(self) -> torch.Tensor:
        text = self._config.thinker_config.text_config
        return make_embeddings(self._tokenizer, text.vocab_size, text.hidden_size)

    def _quantizer(self) -> codec.Quantizer:
        file = self._folder / "quantizer.pt"
        if not file.exists():
            recordings = data.spoken(self._folder)
            chosen = random.Random("quantizer").sample(range(len(recordings)), 3_000)
            quantizer = codec.Quantizer.fit([recordings[i] for i in chosen], torch.Generator().manual_seed(0))
            torch.save(vars(quantizer), file)
        return codec.Quantizer(**torch.load(file))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training", description="Train the shipped models.")
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--folder", type=Path, default=Path("training/run"), help="of data, checkpoints and logs")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    trainer = Trainer(args.folder)
    for part in args.parts:
        getattr(trainer, part)()


if __name__ == "__main__":
    main()
