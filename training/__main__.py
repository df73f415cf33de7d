# SPDX-License-Identifier: Apache-2.0
"""Trains the shipped models, part after part, and writes their checkpoints.

    python -m training [PART ...] [--folder FOLDER]

Parts: vocoder thinker talker vae painter export. Each resumes where it stopped; what is done costs nothing.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, ZImagePipeline
from transformers import AutoProcessor, PreTrainedTokenizerFast, Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

import coloured_shapes
from coloured_shapes.speech import SPEAKERS
from training import codec, data, painter, talker, thinker
from training.config import make_config, save_processor
from training.export import export_omni
from training.painter import Pictures
from training.talker import TalkerTrainer
from training.thinker import ThinkerTrainer
from training.tokenizer import encode, encode_answer, make_embeddings, make_tokenizer

STEPS = {
    "vocoder": 11_000, "vision_alignment": 500, "text_sft": 8_000, "audio_ctc": 4_000, "audio_sft": 6_200,
    "copy_sft": 4_500, "talker": 12_500, "vae": 6_000, "painter": 2_000,
}  # fmt: skip
_FILES = {"thinker": "copy_sft", "talker": "talker", "code2wav": "vocoder"}
"""Modules of the omni model, and the trainings whose results they are."""
CHECKPOINTS = Path(coloured_shapes.__file__).with_name("checkpoints")
PARTS = ("vocoder", "thinker", "talker", "vae", "painter", "export")
NUM_PICTURES = 16_000


class Trainer:
    """The parts, each with what it needs of the others.

    Initial weights have a seed of their own, so that they are the same whichever parts a run trains.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tokenizer: PreTrainedTokenizerFast = make_tokenizer()
        self._config = make_config(self.tokenizer)

    def vocoder(self) -> None:
        def sample(rng: random.Random) -> tuple[torch.Tensor, np.ndarray]:
            tokens = self.tokenizer.convert_ids_to_tokens(encode(self.tokenizer, data.random_text(rng)))
            (voice,) = rng.choices(tuple(SPEAKERS.values()), weights=(2, 1))  # The first is the harder one.
            utterance = speakers.synthesize(tokens, voice)
            return utterance.codes, utterance.audio

        speakers = self._speakers()
        torch.manual_seed(0)
        vocoder = Qwen3OmniMoeCode2Wav(codec.vocoder_config())
        codec.train_vocoder(self._folder, vocoder, sample, STEPS["vocoder"])

    def thinker(self) -> None:
        trainer = self.make_thinker_trainer()
        thinker.train_vision_alignment(self._folder, trainer, STEPS["vision_alignment"])
        thinker.train_text_sft(self._folder, trainer, STEPS["text_sft"])
        speech = thinker.SpeechDataset(data.record_requests(self._folder), self._speakers(), self.tokenizer)
        thinker.train_audio_ctc(self._folder, trainer, speech, STEPS["audio_ctc"])
        thinker.train_audio_sft(self._folder, trainer, speech, STEPS["audio_sft"])
        thinker.train_copy_sft(self._folder, trainer, speech, STEPS["copy_sft"])

    def make_thinker_trainer(self) -> ThinkerTrainer:
        save_processor(self.tokenizer, self._config, self._folder / "processor")
        processor = AutoProcessor.from_pretrained(self._folder / "processor")
        torch.manual_seed(0)
        model = Qwen3OmniMoeThinkerForConditionalGeneration(self._config.thinker_config)
        embeddings = self._embeddings()
        model.get_input_embeddings().weight.data.copy_(embeddings)
        model.get_input_embeddings().requires_grad_(False)
        model.lm_head.weight.data.copy_(0.2 * embeddings)  # It learns sooner to repeat what it reads.
        return ThinkerTrainer(model, processor, self.tokenizer)

    def talker(self) -> None:
        def sample(rng: random.Random) -> talker.SpeechExample:
            text, speaker = data.random_text(rng), rng.choice(tuple(SPEAKERS))
            tokenize = encode_answer if rng.random() < 0.5 else encode  # as the model writes, or is forced to
            tokens = tokenize(self.tokenizer, text)
            utterance = speakers.synthesize(self.tokenizer.convert_ids_to_tokens(tokens), SPEAKERS[speaker])
            return talker.SpeechExample(speaker, tokens, utterance)

        speakers = self._speakers()
        talker.train(self._folder, self.make_talker_trainer(), sample, STEPS["talker"])

    def make_talker_trainer(self) -> TalkerTrainer:
        torch.manual_seed(0)
        model = talker.make_talker(self._config)
        return TalkerTrainer(model, self._config, self._embeddings(), self.tokenizer)

    def export(self) -> None:
        """Writes the checkpoints of `coloured_shapes`, of what is trained."""
        parts = {}
        for name, file in _FILES.items():
            if (trained := self._folder / f"{file}.pt").exists():
                parts[name] = torch.load(trained)["models"][0]
        if "thinker" in parts:  # without what only its training needs
            parts["thinker"] = {
                name.removeprefix("thinker."): weight
                for name, weight in parts["thinker"].items()
                if name.startswith("thinker.")
            }
        export_omni(CHECKPOINTS / "shapes", self._config, self.tokenizer, parts)
        if (trained := self._folder / "painter.pt").exists():
            pipeline = self._pipeline()
            for model, state in zip(painter.trained_models(pipeline), torch.load(trained)["models"], strict=False):
                model.load_state_dict(state)  # without what only its training needs
            pipeline.to(torch.float16).save_pretrained(CHECKPOINTS / "shapes-painter")

    def vae(self) -> None:
        torch.manual_seed(0)
        painter.train_vae(self._folder, painter.make_vae(), STEPS["vae"])

    def painter(self) -> None:
        painter.train_transformer(self._folder, self._pipeline(), self._pictures(), STEPS["painter"])

    def _pipeline(self) -> ZImagePipeline:
        """With the trained autoencoder, which scales latents to mean 0 and standard deviation 1."""
        latents, vae = self._pictures().latents, self._vae()
        vae.register_to_config(scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean()))
        torch.manual_seed(0)
        text_encoder = painter.make_text_encoder(self.tokenizer)
        return painter.make_pipeline(vae, text_encoder, self.tokenizer, painter.make_transformer())

    def _pictures(self) -> Pictures:
        file = self._folder / "pictures.pt"
        if not file.exists():
            torch.save(vars(Pictures.make(self._vae(), random.Random("pictures"), NUM_PICTURES)), file)
        return Pictures(**torch.load(file))

    def _vae(self) -> AutoencoderKL:
        vae = painter.make_vae()
        vae.load_state_dict(torch.load(self._folder / "vae.pt")["models"][0])
        return vae

    def _embeddings(self) -> torch.Tensor:
        text = self._config.get_text_config()
        return make_embeddings(self.tokenizer, text.vocab_size, text.hidden_size)

    def _speakers(self) -> data.Speakers:
        file = self._folder / "quantizer.pt"
        if not file.exists():
            audio = data.Speakers(self._folder).audio
            quantizer = codec.Quantizer.fit(list(audio.values()), torch.Generator().manual_seed(0))
            torch.save(vars(quantizer), file)
        return data.Speakers(self._folder, codec.Quantizer(**torch.load(file)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training", description="Train the shipped models.")
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--folder", type=Path, default=Path("training/run"), help="of data, checkpoints and logs")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args.folder)
    for part in args.parts:
        getattr(trainer, part)()


if __name__ == "__main__":
    main()
