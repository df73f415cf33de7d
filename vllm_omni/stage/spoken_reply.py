# SPDX-License-Identifier: Apache-2.0
"""What a stage that speaks gets of a reply: its content, without tool calls and reasoning.

vLLM's parsers find them in the text; this file finds the tokens of the content, and knows no parser.
"""

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from vllm.parser import ParserManager
from vllm.parser.abstract_parser import Parser
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike, get_tokenizer
from vllm.tool_parsers import ToolParserManager
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from vllm_omni.inputs import ReplyParsers, SpokenText, StageRequest
from vllm_omni.outputs import StageOutput
from vllm_omni.vllm_protocol import ChatCompletionRequest, DeltaMessage


class SpokenReply:
    """One reply: drops the tokens that are not spoken, with their rows and their text, from its pieces as they arrive.

    The rest is a reply like any other: it has a last token, whose row nobody needs, and one row less than tokens. White
    space is kept where something is spoken after it.
    """

    def __init__(self, request: StageRequest) -> None:
        """
        Args:
            request: With `spoken_text`.

        Raises:
            Exception: As `load_parsers`, which is called before where nobody may wait.
        """
        assert request.spoken_text is not None
        self._name = request.spoken_text.rows
        self._content = _Content(request.spoken_text, request.prompt_token_ids)
        self._num_prompt_rows_missing = len(request.prompt_token_ids)
        self._token_ids: list[int] = []
        self._num_judged = 0
        self._num_rows = 0
        self._rows: dict[int, torch.Tensor] = {}  # by token; those that may still be passed on
        self._blank: list[int] = []  # tokens that are spoken if others follow
        self._blank_text = ""  # theirs
        self._last: int | None = None  # the last token that was passed on, without its row

    def select(self, piece: StageOutput) -> StageOutput:
        """The next piece without what is not spoken. Of what is not decided yet later pieces have the rest."""
        first = piece.first_completion
        token_ids = [] if first is None else first.token_ids
        self._token_ids += token_ids
        rows = self._take_rows(piece.tensors.get(self._name))
        kept, text, kept_rows = self._judge(token_ids, piece)
        tensors = dict(piece.tensors)
        parts = ([] if rows is None else [rows]) + ([torch.stack(kept_rows)] if kept_rows else [])
        if parts:
            tensors[self._name] = torch.cat(parts)
        if first is None:
            return msgspec.structs.replace(piece, tensors=tensors)
        return msgspec.structs.replace(
            piece, tensors=tensors, completions=[msgspec.structs.replace(first, token_ids=kept, text=text)]
        )

    def _take_rows(self, rows: torch.Tensor | None) -> torch.Tensor | None:
        """Keeps the rows of the reply; returns those of the prompt."""
        if rows is None:
            return None
        of_prompt, of_reply = rows[: self._num_prompt_rows_missing], rows[self._num_prompt_rows_missing :]
        self._num_prompt_rows_missing -= len(of_prompt)
        for row in of_reply:
            self._rows[self._num_rows] = row.clone()
            self._num_rows += 1
        return of_prompt

    def _judge(self, token_ids: list[int], piece: StageOutput) -> tuple[list[int], str, list[torch.Tensor]]:
        """The tokens that are passed on now, their text, and the rows."""
        passed: list[int] = []
        passed_text = ""
        for text in self._content.add(token_ids, piece.is_last, piece.finish_reason == "stop"):
            if text is not None:
                self._blank.append(self._num_judged)
                self._blank_text += text
                if text.strip():
                    passed += self._blank
                    passed_text += self._blank_text
                    self._blank, self._blank_text = [], ""
            self._num_judged += 1
        with_rows = passed if self._last is None else [self._last, *passed]
        self._last = with_rows[-1] if with_rows else None
        with_rows = with_rows[:-1]
        end = len(self._token_ids) - 1
        if piece.is_last and self._last != end and end >= 0:
            with_rows += [] if self._last is None else [self._last]
            passed.append(end)
        rows = [self._rows[i] for i in with_rows] if self._name else []
        wanted = {*self._blank, self._last}
        self._rows = {i: row for i, row in self._rows.items() if i >= self._num_judged or i in wanted}
        return [self._token_ids[i] for i in passed], passed_text, rows


def read_spoken(spoken: SpokenText, prompt_token_ids: list[int], token_ids: Sequence[int], is_stopped: bool) -> str:
    """What a stage that speaks gets of a whole reply, as text. Takes long: call it in a thread beside an event loop."""
    texts = _Content(spoken, prompt_token_ids).add(token_ids, True, is_stopped)
    return "".join(text for text in texts if text is not None)


class _Content:
    """Decides which tokens of a reply are content."""

    def __init__(self, spoken: SpokenText, prompt_token_ids: list[int]) -> None:
        tokenizer, parser = load_parsers(spoken.parsers)
        self._request = request = ChatCompletionRequest.model_validate({**spoken.request, "messages": []})
        tools: Any = request.tools  # which vLLM's parsers take, although their type does not say so
        self._parser = parser(tokenizer, tools, chat_template_kwargs=request.chat_template_kwargs)
        self._prompt_token_ids = prompt_token_ids
        self._detokenizer = _make_detokenizer(tokenizer, request, prompt_token_ids)
        self._open: list[str] = []  # the texts of the tokens that are not decided yet

    def add(self, token_ids: Sequence[int], is_last: bool, is_stopped: bool) -> list[str | None]:
        """Adds tokens; returns, in order, of those that are decided now the text, or None: it is not content.

        Args:
            is_stopped: The last token has ended the reply.
        """
        decided: list[str | None] = []
        ends = [*[False] * (len(token_ids) - 1), is_last] if token_ids else []
        for token_id, is_end in zip(token_ids, ends, strict=True):
            self._detokenizer.update([token_id], is_end and is_stopped)
            text = self._detokenizer.get_next_output_text(True, delta=True)
            self._open.append(text)
            decided += self._decide(self._parse(text, [token_id], is_end))
        if is_last:
            if not token_ids:
                decided += self._decide(self._parse("", [], True))
            decided += [None] * len(self._open)
        return decided

    def _parse(self, text: str, token_ids: list[int], is_end: bool) -> DeltaMessage | None:
        return self._parser.parse_delta(text, token_ids, self._request, self._prompt_token_ids, finished=is_end)

    def _decide(self, delta: DeltaMessage | None) -> list[str | None]:
        """A parser holds text back until it knows what it is: the content of a delta may be that of earlier tokens."""
        texts = self._open
        if delta is None or not (delta.content or delta.reasoning or delta.tool_calls):
            return []
        decided: list[str | None] = [None] * len(texts)
        if delta.content:
            start, stop = _find(delta.content, "".join(texts))
            decided, position = [], 0
            for text in texts:
                if position > stop or (position == stop and text):
                    break
                position += len(text)
                is_before = position < start or (position == start and text)
                decided.append(None if is_before else text)
        self._open = texts[len(decided) :]
        return decided


def _find(content: str, text: str) -> tuple[int, int]:
    """Where the content is in a text that ends with it, or with it and what a parser holds back."""
    for form in (content, content.strip()):
        if form and (start := text.rfind(form)) >= 0:
            return start, start + len(form)
    return 0, len(text)  # The parser has changed it.


def _make_detokenizer(
    tokenizer: TokenizerLike, request: ChatCompletionRequest, prompt_token_ids: list[int]
) -> IncrementalDetokenizer:
    params = SamplingParams(
        skip_special_tokens=request.skip_special_tokens,
        spaces_between_special_tokens=request.spaces_between_special_tokens,
    )
    return IncrementalDetokenizer.from_new_request(
        tokenizer, EngineCoreRequest("", prompt_token_ids, None, params, None, 0.0, None, None, None)
    )


@functools.cache
def load_parsers(parsers: ReplyParsers) -> tuple[TokenizerLike, type[Parser]]:
    """The tokenizer and the parser's class. The first call for them takes a second, or more.

    Raises:
        Exception: One of them cannot be loaded.
    """
    if parsers.tool_parser_plugin:
        ToolParserManager.import_tool_parser(parsers.tool_parser_plugin)
    if parsers.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(parsers.reasoning_parser_plugin)
    parser = ParserManager.get_parser(
        parsers.tool_parser, parsers.reasoning_parser, enable_auto_tools=True, model_name=parsers.tokenizer
    )
    assert parser is not None, "a request without parsers has no spoken_text"
    tokenizer = get_tokenizer(
        parsers.tokenizer,
        tokenizer_mode=parsers.tokenizer_mode,
        revision=parsers.tokenizer_revision,
        trust_remote_code=parsers.trust_remote_code,
    )
    return tokenizer, parser
