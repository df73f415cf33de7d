# SPDX-License-Identifier: Apache-2.0
"""The text of a request, made of its tokens in the caller's process, with vLLM's detokenizer."""

from vllm.tokenizers import TokenizerLike
from vllm.v1.engine.detokenizer import IncrementalDetokenizer, uses_fast_detokenizer

from vllm_omni.outputs import StageOutput
from vllm_omni.payloads import OmniEngineCoreRequest


class TextDecoder:
    """Decodes the outputs of a stage for one request, in order."""

    def __init__(self, tokenizer: TokenizerLike, request: OmniEngineCoreRequest) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}  # by index of the sequence

    @classmethod
    def take_over(cls, tokenizer: TokenizerLike | None, request: OmniEngineCoreRequest) -> "TextDecoder | None":
        """The decoder of a request whose engine then makes no text; None if the engine has to.

        It has to where it reads the text itself, to find stop strings and to name tokens with their logprobs. vLLM's
        slow detokenizer is no object for another thread.
        """
        params = request.sampling_params
        assert params is not None, "stages take no pooling requests"
        reads_text = bool(params.stop) or params.logprobs is not None or params.prompt_logprobs is not None
        if tokenizer is None or not uses_fast_detokenizer(tokenizer) or not params.detokenize or reads_text:
            return None
        params.detokenize = False
        return cls(tokenizer, request)

    def reset(self) -> None:
        """The request starts again."""
        self._detokenizers.clear()

    def decode(self, piece: StageOutput) -> None:
        """Sets the text of a piece of the output: that of its tokens."""
        for completion in piece.completions:
            detokenizer = self._detokenizers.get(completion.index)
            if detokenizer is None:
                detokenizer = IncrementalDetokenizer.from_new_request(self._tokenizer, self._request)
                self._detokenizers[completion.index] = detokenizer
            detokenizer.update(completion.token_ids, completion.finish_reason == "stop")
            is_finished = completion.finish_reason is not None
            completion.text = detokenizer.get_next_output_text(is_finished, delta=True)
