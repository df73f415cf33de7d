# SPDX-License-Identifier: Apache-2.0
"""The talker: speaks the thinker's reply, one frame of codes a step.

A step reads the frame of the step before, and only its first code comes from this model: the residual
codes are made by the code predictor when the first code is fed back, inside `preprocess`. So the frame
of the last sampled token is never made, whether the reply ended or was cut, as in the reference.

Row outputs: `codes`, int64 `[frames, num_code_groups]`.
Reference: `Qwen3OmniMoeTalkerForConditionalGeneration` of HF transformers. This file knows no engine.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.interfaces import RequestSpan
from vllm_omni.model_executor.models.qwen3_omni_moe.code_predictor import (
    SAMPLING_TOP_K,
    SAMPLING_TOP_P,
    CodePredictor,
    ResidualSampling,
)
from vllm_omni.model_executor.models.qwen3_omni_moe.talker_prompt import (
    TalkerPromptBuilder,
    TalkerText,
    ThinkerRows,
)

NUM_SUPPRESSED = 1024
"""The last ids of the codec vocabulary are specials and voices; of them only the end may be sampled."""

THINKER_EMBEDDING = "thinker.model.embed_tokens.weight"

_STATE = "talker_state"
_LAST_HIDDEN = "last_hidden"
_RESIDUAL_SEED = 0x5EED0FC0DE


@dataclass(slots=True)
class TalkerState:
    """What a request keeps between its steps, under `talker_state` in its additional information.

    Attributes:
        text: Its prompt and the text rows that it reads while it speaks.
        frames: `[num_code_groups]` int64 for each frame made so far. After a preemption the same rows are
            built from them again; nothing is sampled twice.
        generator: Of a request with a seed, for its residual codes.
    """

    text: TalkerText
    generator: torch.Generator | None
    frames: list[torch.Tensor] = field(default_factory=list)

    def text_row(self, frame: int, tts_pad: torch.Tensor) -> torch.Tensor:
        """`[hidden]`, the text that goes with a frame."""
        return self.text.trailing[frame] if frame < self.text.trailing.shape[0] else tts_pad


@dataclass(frozen=True, slots=True)
class NewFrame:
    """A row of the step whose residual codes are yet to be made."""

    row: int
    state: TalkerState
    last_hidden: torch.Tensor
    sampling_params: SamplingParams


class OmniQwen3OmniMoeTalker(nn.Module, SupportsMRoPE):
    """Predicts the first code of each frame, and the residual codes of the frame before."""

    omni_output_rows: ClassVar[Literal["all", "generated"]] = "generated"

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.model.codec_embedding.": "model.embed_tokens.",
            "talker.text_projection.": "prompt_builder.text_projection.",
            "talker.hidden_projection.": "prompt_builder.hidden_projection.",
            "talker.": "",
            "thinker.": None,
            "code2wav.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        text_config = config.text_config
        self.config = config
        self.model = Qwen3MoeModel(
            vllm_config=vllm_config.with_hf_config(text_config, architectures=["Qwen3MoeForCausalLM"]),
            prefix=maybe_prefix(prefix, "model"),
        )
        self.codec_head = ParallelLMHead(
            text_config.vocab_size,
            text_config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "codec_head"),
        )
        self.logits_processor = LogitsProcessor(text_config.vocab_size)
        self.prompt_builder = TalkerPromptBuilder(config)
        self.code_predictor = CodePredictor(
            config.code_predictor_config, max_batch_size=vllm_config.scheduler_config.max_num_seqs
        )
        suppressed = torch.arange(text_config.vocab_size) >= text_config.vocab_size - NUM_SUPPRESSED
        suppressed[config.codec_eos_token_id] = False
        self.suppressed: torch.Tensor
        self.register_buffer("suppressed", suppressed, persistent=False)

    # ---- vLLM's model interface

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Codec embeddings of first codes; the rest of a row's input is added in `preprocess`."""
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = self.logits_processor(self.codec_head, hidden_states)
        return None if logits is None else logits.masked_fill_(self.suppressed, float("-inf"))

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        """Linear positions; the stage input processor sends others where the user showed images or videos."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Lets vLLM's loader skip files that hold only other stages' weights."""
        return not name.startswith("talker.") and name != THINKER_EMBEDDING

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loader = AutoWeightsLoader(self)
        control: list[torch.Tensor] = []
        loaded = loader.load_weights(self._take_control_rows(weights, control), mapper=self.hf_to_vllm_mapper)
        if not control:
            raise ValueError(f"the checkpoint has no {THINKER_EMBEDDING!r}, which the talker's prompt needs")
        self.prompt_builder.set_control_embeds(control[0])
        return loaded

    def _take_control_rows(
        self, weights: Iterable[tuple[str, torch.Tensor]], control: list[torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Passes weights on, and puts the thinker's embeddings of `tts_bos`, `tts_eos`, `tts_pad` aside."""
        whole = self.config.omni_parent_config
        ids = [whole[f"tts_{name}_token_id"] for name in ("bos", "eos", "pad")]
        for name, tensor in weights:
            if name == THINKER_EMBEDDING:
                control.append(tensor[ids].clone())
            else:
                yield name, tensor

    # ---- the runner's hooks, in the order in which a step calls them

    def preprocess(
        self, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None, spans: list[RequestSpan]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Builds every row's input, and makes the residual codes of every code that is fed back."""
        embeds = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        codes = input_ids.new_zeros(input_ids.shape[0], self.config.num_code_groups, dtype=torch.int64)
        new_frames: list[NewFrame] = []
        for span in spans:
            state = self._state_of(span)
            if span.position < span.num_prompt_tokens:
                self._write_prompt_rows(span, state, embeds)
            new_frames += self._replay_frames(span, state, embeds, codes)
        if new_frames:
            self._make_frames(new_frames, input_ids, embeds, codes)
        return embeds, {"codes": codes}

    def make_omni_output(
        self,
        hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        preprocessed: dict[str, torch.Tensor],
        spans: list[RequestSpan],
    ) -> dict[str, torch.Tensor]:
        return preprocessed

    def postprocess(self, hidden_states: torch.Tensor, spans: list[RequestSpan]) -> list[dict[str, Any]]:
        """Keeps the state that a token was sampled from: its residual codes are predicted from it."""
        last_rows = torch.tensor([span.stop - 1 for span in spans], device=hidden_states.device)
        last_hidden = hidden_states.index_select(0, last_rows).unbind(0)
        return [{_LAST_HIDDEN: hidden} if span.samples else {} for span, hidden in zip(spans, last_hidden, strict=True)]

    # ---- one request

    def _state_of(self, span: RequestSpan) -> TalkerState:
        information = span.additional_information
        if _STATE not in information:
            rows = ThinkerRows.pop_from(information)
            information[_STATE] = TalkerState(
                text=self.prompt_builder(rows, self.model.embed_tokens),
                generator=self._make_generator(span.sampling_params),
            )
        return information[_STATE]

    def _make_generator(self, params: SamplingParams) -> torch.Generator | None:
        if params.seed is None or params.sampling_type != SamplingType.RANDOM_SEED:
            return None
        # Not the seed itself: vLLM's sampler draws the first code from a generator with that one.
        return torch.Generator(self.suppressed.device).manual_seed(params.seed ^ _RESIDUAL_SEED)

    def _write_prompt_rows(self, span: RequestSpan, state: TalkerState, embeds: torch.Tensor) -> None:
        stop = min(span.position + span.num_rows, span.num_prompt_tokens)
        rows = state.text.prompt[span.position : stop]
        embeds[span.start : span.start + rows.shape[0]] = rows

    def _replay_frames(
        self, span: RequestSpan, state: TalkerState, embeds: torch.Tensor, codes: torch.Tensor
    ) -> list[NewFrame]:
        """Writes rows whose frames are known (after a preemption); returns the one, if any, that is new."""
        first = max(span.position - span.num_prompt_tokens, 0)
        stop = span.position + span.num_rows - span.num_prompt_tokens
        known = min(stop, len(state.frames))
        offset = span.start + span.num_prompt_tokens - span.position  # the row of frame 0
        if first < known:
            frames = torch.stack(state.frames[first:known])
            rows = slice(offset + first, offset + known)
            codes[rows] = frames
            embeds[rows] = self._embed_frames(frames, first, state)
        if stop <= known:
            return []
        assert stop == known + 1, f"{span.req_id}: {stop - known} frames at once"
        last_hidden = span.additional_information[_LAST_HIDDEN]
        return [NewFrame(offset + known, state, last_hidden, span.sampling_params)]

    def _embed_frames(self, frames: torch.Tensor, first: int, state: TalkerState) -> torch.Tensor:
        """`[n, num_code_groups]` frames `first..` of a request -> `[n, hidden]`."""
        text = [state.text_row(first + i, self.prompt_builder.tts_pad) for i in range(frames.shape[0])]
        residual = self.code_predictor.embed_codes(frames[:, 1:])
        return self.embed_input_ids(frames[:, 0]) + residual + torch.stack(text)

    # ---- all requests of a step

    def _make_frames(
        self, new_frames: list[NewFrame], input_ids: torch.Tensor, embeds: torch.Tensor, codes: torch.Tensor
    ) -> None:
        """Predicts the residual codes of all new frames as one batch, and writes their rows."""
        rows = torch.tensor([new.row for new in new_frames], device=input_ids.device)
        first_codes = input_ids[rows].long()
        first_embeds = embeds[rows]  # the ids are embedded already
        frame = self.code_predictor(
            torch.stack([new.last_hidden for new in new_frames]), first_embeds, self._residual_sampling(new_frames)
        )
        tts_pad = self.prompt_builder.tts_pad
        text = torch.stack([new.state.text_row(len(new.state.frames), tts_pad) for new in new_frames])
        embeds[rows] = first_embeds + frame.embeds + text
        whole = torch.cat((first_codes[:, None], frame.codes), dim=1)  # [B, num_code_groups]
        codes[rows] = whole
        for new, row in zip(new_frames, whole.unbind(0), strict=True):
            new.state.frames.append(row)

    def _residual_sampling(self, new_frames: list[NewFrame]) -> ResidualSampling | None:
        """Residual codes are greedy where the request is; None if all are."""
        greedy = [new.sampling_params.sampling_type == SamplingType.GREEDY for new in new_frames]
        if all(greedy):
            return None
        device = self.suppressed.device
        shape = (len(new_frames), self.code_predictor.num_steps, SAMPLING_TOP_K)
        noise = torch.empty(shape, dtype=torch.float32, device=device).exponential_()
        for row, new in zip(noise, new_frames, strict=True):
            if new.state.generator is not None:
                row.exponential_(generator=new.state.generator)
        top_p = torch.tensor([[0.0 if is_greedy else SAMPLING_TOP_P] for is_greedy in greedy], device=device)
        return ResidualSampling(top_p=top_p, noise=noise)
