# SPDX-License-Identifier: Apache-2.0
"""The frames of all requests of a model: made once, kept, and read again after a preemption.

For feedback strategies, which call it where their own methods are called. This file knows no model and no runner.
"""

import torch
from vllm.sampling_params import SamplingParams

from vllm_omni.model_executor.feedback import FedBackRows
from vllm_omni.model_executor.feedback_buffers import SlotBuffer, with_room_for
from vllm_omni.model_executor.layers.depth_decoder import DepthDecoder
from vllm_omni.model_executor.layers.residual_codes import ResidualFilter, ResidualSampler


class FrameMemory:
    """What is kept of requests: their frames, the state that each sampled its last token from, and how residual codes
    are sampled."""

    def __init__(
        self, num_codes: int, num_draws: int, like: torch.Tensor, max_batch_size: int, max_frames: int
    ) -> None:
        """
        Args:
            num_codes: Codes of a frame, the first included.
            num_draws: Codes that are sampled here for each frame.
            like: `[..., hidden]` on the model's device, in the dtype of its states.
            max_batch_size: As in `SupportsFeedback.make_feedback_strategy`.
            max_frames: The most frames of a request.
        """
        self._max_frames = max_frames
        self._codes = SlotBuffer((num_codes,), max_batch_size, max_frames, dtype=torch.int64, device=like.device)
        self._last_hidden = like.new_zeros(max_batch_size, like.shape[-1])
        self._sampler = ResidualSampler(num_draws, max_batch_size, like.device)

    def begin(self, slot: int, params: SamplingParams, residual: ResidualFilter) -> None:
        """
        Args:
            residual: For a request that samples; a greedy one has greedy residual codes.
        """
        self._codes.reserve(slot, min(params.max_tokens or self._max_frames, self._max_frames))
        self._last_hidden = with_room_for(self._last_hidden, slot)
        self._sampler.begin(slot, params, residual)

    def end(self, slot: int) -> None:
        self._codes.free(slot)
        self._sampler.end(slot)

    @property
    def buffer_bytes(self) -> int:
        """The memory of the frames that are kept."""
        return self._codes.nbytes

    def save_hidden_states(self, slots: torch.Tensor, hidden_states: torch.Tensor) -> None:
        """A token's residual codes are predicted from the state that the token is sampled from; see
        `FeedbackStrategy.save_hidden_states`."""
        self._last_hidden[slots] = hidden_states


class FrameLoop(FrameMemory):
    """The first code of a frame is the token that a request has sampled; its residual codes are computed by a depth
    decoder when the token is fed back. So the frame of the last sampled token is never computed, whether the speech
    ended or was cut."""

    def __init__(self, decoder: DepthDecoder, max_batch_size: int, max_frames: int) -> None:
        """
        Args:
            decoder: With its weights, on the model's device.
            max_batch_size, max_frames: As in `FrameMemory`.
        """
        super().__init__(decoder.num_codes, decoder.num_steps, decoder.codec_embedding, max_batch_size, max_frames)
        self._decoder = decoder

    def make(self, rows: FedBackRows, first_embeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes the next frame of each row.

        Args:
            first_embeds: `[N, input_size]`, the depth decoder's rows of `rows.token_ids`.

        Returns:
            `[N, num_codes]` int64, the frames; and `[N, input_size]`, the sum of the residual codes' embeddings.
        """
        frame = self._decoder(self._last_hidden[rows.slots], first_embeds, self._sampler.draw(rows.slots))
        codes = torch.cat((rows.token_ids[:, None], frame.codes), dim=1)
        self._codes.write(rows.slots, rows.frames, codes)
        return codes, frame.embeds

    def read(self, rows: FedBackRows) -> tuple[torch.Tensor, torch.Tensor]:
        """What `make` returned for these rows, bit by bit."""
        codes = self._codes.read(rows.slots, rows.frames)
        return codes, self._decoder.embed_codes(codes[:, 1:])
