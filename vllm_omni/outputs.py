# SPDX-License-Identifier: Apache-2.0
"""The output of a stage, and the output for callers.

`StageOutput` crosses processes; `OmniRequestOutput` is the public class.
"""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import msgspec
import torch
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

from vllm_omni import notebook
from vllm_omni.errors import RequestError
from vllm_omni.media import count_media, read_media
from vllm_omni.metrics.stats import StageMetrics


class Completion(msgspec.Struct, kw_only=True):
    """One of the `n` sequences of an autoregressive stage; vLLM's `CompletionOutput` as a struct."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WeightVersionSpan] | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The denoising steps of one output of a diffusion stage, as a trainer needs them; on the CPU.

    A step's latents are `mean + std * noise`, and only the mean depends on the weights. In diffusers' flow matching
    with `stochastic_sampling`, with the network's prediction `v` and `sigma = timestep / 1000`, the mean is
    `(1 - std) * (latents - sigma * v)`, and `std` is the next step's `sigma`.

    Attributes:
        latents: Before each step, and after the last one: `[steps + 1, ...]`, as the pipeline passes them to its
            scheduler, without the batch dimension.
        noise: That each step has drawn, `[steps, ...]`; zeros where it draws none.
        timesteps: float32 `[steps]`, the scheduler's.
        std: float32 `[steps]`, the factor of the noise; 0 of a step that is determined.
        log_probs: float32 `[steps]`, of the latents after each step, the mean of all elements; 0 where `std` is 0.
    """

    latents: torch.Tensor
    noise: torch.Tensor
    timesteps: torch.Tensor
    std: torch.Tensor
    log_probs: torch.Tensor


_TRAJECTORY = "trajectory."


def pack_trajectories(trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """`StageOutput.tensors` of one trajectory for each of n outputs: `trajectory.latents` `[n, steps + 1, ...]`, ..."""
    names = [field.name for field in dataclasses.fields(Trajectory)] if trajectories else []
    return {f"{_TRAJECTORY}{name}": torch.stack([getattr(it, name) for it in trajectories]) for name in names}


class StageOutput(msgspec.Struct, kw_only=True):
    """The output of one stage for one request: the whole, or a segment of a stream.

    `merge_stage_outputs` joins the segments of a stream. A stage input processor receives windows
    (`stage.window.WindowState`), described by the last three attributes; the whole result is the last window, and
    starts at 0.

    Attributes:
        prompt_token_ids: The prompt of this stage's engine (placeholders expanded); in a stream, in the first segment.
        prompt_logprobs: The likeliest tokens for each of them (None for the first), if requested; in the first segment.
        num_cached_tokens: How many of them were in the engine's prefix cache; None if unknown.
        completions: Generated sequences; empty for stages that generate none. In a stream: new text and tokens.
        tensors: The model's outputs by name, on the CPU, e.g. `audio` float32 `[samples]`. In a stream: new rows.
            Of a diffusion stage the result of `media.encode_outputs`, with that of `pack_trajectories`; during its
            steps, a preview `image`.
        data: Plain values: results of function stages; of a diffusion stage `output_type`, `output_format`, `fps` and
            `sample_rate`, and during its steps the `index` of the output.
        step, num_steps: Progress of the output of a diffusion stage; None for other stages.
        start: Units of the source's output before this window, without its context.
        context: Units at the start of this window that were in an earlier window.
        is_last: The last segment or window.
    """

    request_id: str
    stage_id: int
    prompt: str | None = None
    prompt_token_ids: list[int] = []
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
    completions: list[Completion] = []
    tensors: dict[str, torch.Tensor] = {}
    data: dict[str, Any] = {}
    step: int | None = None
    num_steps: int | None = None
    start: int = 0
    context: int = 0
    is_last: bool = True

    @property
    def first_completion(self) -> Completion | None:
        """The first of the generated sequences, which other stages read; None if this segment does not have it."""
        return next((completion for completion in self.completions if completion.index == 0), None)

    @property
    def finish_reason(self) -> str | None:
        """Why the first sequence ended; None while it continues, or if there is none."""
        first = self.first_completion
        return None if first is None else first.finish_reason

    @property
    def num_media(self) -> int:
        """Number of finished images, videos or clips of a diffusion stage; 0 for other stages."""
        return count_media(self.tensors, self.data)


def merge_stage_outputs(pieces: Sequence[StageOutput]) -> StageOutput:
    """Joins the segments of a stream, in order, to the output of the stage without streaming.

    Segments with the progress of a diffusion stage are not part of its result, unless there are no others.
    """
    if len(pieces) == 1:
        return pieces[0]
    parts = [piece for piece in pieces if piece.step is None] or [pieces[-1]]
    return msgspec.structs.replace(
        parts[-1],
        request_id=pieces[0].request_id,
        stage_id=pieces[0].stage_id,  # The end of a function stage's stream has none.
        prompt=next((part.prompt for part in parts if part.prompt is not None), None),
        prompt_token_ids=next((part.prompt_token_ids for part in parts if part.prompt_token_ids), []),
        prompt_logprobs=next((part.prompt_logprobs for part in parts if part.prompt_logprobs), None),
        num_cached_tokens=next((p.num_cached_tokens for p in parts if p.num_cached_tokens is not None), None),
        completions=_merge_completions(parts),
        tensors=_merge_tensors(parts),
        data={name: value for part in parts for name, value in part.data.items()},
        start=pieces[0].start,
        context=pieces[0].context,
        is_last=pieces[-1].is_last,
    )


def _merge_completions(parts: Sequence[StageOutput]) -> list[Completion]:
    by_index: dict[int, list[Completion]] = {}
    for part in parts:
        for completion in part.completions:
            by_index.setdefault(completion.index, []).append(completion)
    return [_merge_completion(by_index[index]) for index in sorted(by_index)]


def _merge_completion(parts: list[Completion]) -> Completion:
    if len(parts) == 1:
        return parts[0]
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    cumulative = [part.cumulative_logprob for part in parts if part.cumulative_logprob is not None]
    return Completion(
        index=parts[0].index,
        text="".join(part.text for part in parts),
        token_ids=[token for part in parts for token in part.token_ids],
        cumulative_logprob=cumulative[-1] if cumulative else None,
        logprobs=[position for piece in logprobs for position in piece] if logprobs else None,
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
        weight_versions=parts[-1].weight_versions,
    )


def _merge_tensors(parts: Sequence[StageOutput]) -> dict[str, torch.Tensor]:
    rows: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            rows.setdefault(name, []).append(tensor)
    return {name: concatenate(tensors, stream_dim(name)) for name, tensors in rows.items()}


def stream_dim(name: str) -> int:
    """The dimension along which a tensor of this name grows in a stream: time for audio, rows for all others."""
    return -1 if name == "audio" else 0


def concatenate(tensors: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Along one dimension; scalars become a vector."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors, dim) if tensors[0].ndim else torch.stack(tensors)


class StreamShapes:
    """The shapes of a stream's tensors: pieces that cannot be joined are refused when they come, not at the end."""

    def __init__(self) -> None:
        self._shapes: dict[str, list[int] | None] = {}

    def check(self, piece: StageOutput) -> None:
        """
        Raises:
            ValueError: A tensor differs from an earlier one in a dimension that does not grow.
        """
        if piece.step is not None:
            return  # Previews are not joined.
        for name, tensor in piece.tensors.items():
            shape = _fixed_shape(name, tensor)
            before = self._shapes.setdefault(name, shape)
            if shape != before:
                raise ValueError(
                    f"pieces of {name!r} differ in shape: {before} and then {shape}, without the dimension that grows; "
                    "make all pieces of a stream equal there"
                )


def _fixed_shape(name: str, tensor: torch.Tensor) -> list[int] | None:
    """The shape without the dimension that grows; None of a scalar."""
    if not tensor.ndim:
        return None
    shape = list(tensor.shape)
    del shape[stream_dim(name)]
    return shape


def without_content(output: StageOutput) -> StageOutput:
    """The output without the content of segments: no text and no tokens, and tensors without rows."""
    return msgspec.structs.replace(
        output,
        completions=[msgspec.structs.replace(c, text="", token_ids=[], logprobs=None) for c in output.completions],
        tensors={
            name: tensor.narrow(stream_dim(name), 0, 0).clone()
            for name, tensor in output.tensors.items()
            if tensor.ndim
        },
    )


def select_fields(output: StageOutput, reads: Collection[str] | None) -> StageOutput:
    """The output with only the fields in `reads` (see `StageInputProcessor.reads`); None: all fields."""
    if reads is None:
        return output
    return msgspec.structs.replace(
        output,
        prompt=output.prompt if "prompt" in reads else None,
        prompt_token_ids=output.prompt_token_ids if "prompt_token_ids" in reads else [],
        prompt_logprobs=None,
        completions=output.completions if "completions" in reads else [],
        tensors=_select(output.tensors, "tensors", reads),
        data=_select(output.data, "data", reads),
    )


def reads_tensors(reads: Collection[str] | None) -> bool:
    """Whether `reads` contains a tensor."""
    return reads is None or any(name.partition(".")[0] == "tensors" for name in reads)


def _select(values: dict[str, Any], field: str, reads: Collection[str]) -> dict[str, Any]:
    if field in reads:
        return values
    return {name: value for name, value in values.items() if f"{field}.{name}" in reads}


class OmniRequestOutput:
    """The output of one final stage for one prompt.

    Attributes:
        request_id: The caller's id of the request; equal in all outputs of one prompt.
        stage_id: The final stage that made this output.
        final_output_type: The type of the output: `text`, `audio`, `image`, `video`, ...
        request_output: A list of one vLLM `RequestOutput`; its main fields are also attributes of this class.
        multimodal_output: Tensors by name on the CPU. `audio` is float32 `[samples]` of a speech model, and
            `[n, channels, samples]` of a diffusion stage with n clips, or n videos with sound. Shapes of `image` and
            `video`: see `media.encode_outputs`; `images` and `videos` have the same content as Python objects.
        stage_metrics: Metrics of each stage that processed the prompt, in stage order.
        sample_rate: Samples per second of `audio`, or of a file's sound; None if there is none, or it is not known.
        fps: Frames per second of a video; None for other outputs.
        output_format: Format of `images` and `videos`: `pil`, `png`, `mp4`, ...; None if there are none.
        error: Why the prompt failed, with `on_error="return"`: its one output, of no type, has nothing else.
    """

    error: RequestError | None = None

    def __init__(
        self,
        request_id: str,
        output: StageOutput,
        final_output_type: str,
        stage_metrics: list[StageMetrics],
        sample_rate: int | None = None,
    ) -> None:
        """
        Args:
            output: The complete output of the stage.
            sample_rate: That of the stage's configuration; `output.data` of a diffusion pipeline wins.
        """
        self.request_id = request_id
        self.stage_id = output.stage_id
        self.final_output_type = final_output_type
        self.request_output = [_as_request_output(request_id, output)]
        self.multimodal_output = output.tensors
        self.stage_metrics = stage_metrics
        self._data = output.data
        if final_output_type == "image" and "output_type" not in self._data:  # of a stage that is no diffusion stage
            self._data = {**self._data, "output_type": "image", "output_format": "np"}
        self._num_media = count_media(output.tensors, self._data)
        media_data = self._data if self._num_media else {}
        self.sample_rate: int | None = media_data.get("sample_rate") or sample_rate
        self.fps: float | None = media_data.get("fps")
        self.output_format: str | None = media_data.get("output_format")

    @classmethod
    def failed(cls, error: RequestError) -> Self:
        """The output of a prompt that failed."""
        stage_id = -1 if error.stage_id is None else error.stage_id
        output = cls(error.request_id, StageOutput(request_id=error.request_id, stage_id=stage_id), "", [])
        output.error = error
        return output

    @cached_property
    def images(self) -> list[Any]:
        """The images of a diffusion stage, in the request's `output_format`; of any other stage in `np`.

        `pil`: PIL images; `np`: float32 arrays `[height, width, channels]` in [0, 1]; `png`, `jpeg`, `webp`: bytes
        of one file each; `latent`: tensors. Empty for other outputs.
        """
        return self._media("image")

    @cached_property
    def videos(self) -> list[Any]:
        """The videos of a diffusion stage, in the request's `output_format`, with `fps` frames per second.

        `pil`: lists of PIL images; `np`: float32 arrays `[frames, height, width, channels]` in [0, 1]; `mp4`: bytes
        of one file each, with the sound; `latent`: tensors. Empty for other outputs.
        """
        return self._media("video")

    @cached_property
    def trajectories(self) -> list[Trajectory]:
        """The denoising steps of each output of a diffusion stage, with `return_trajectory`; empty without."""
        named = {
            name.removeprefix(_TRAJECTORY): tensor
            for name, tensor in self.multimodal_output.items()
            if name.startswith(_TRAJECTORY)
        }
        rows = (dict(zip(named, row, strict=True)) for row in zip(*named.values(), strict=True))
        return [Trajectory(**row) for row in rows]

    def _media(self, output_type: str) -> list[Any]:
        is_it = self._num_media > 0 and self._data["output_type"] == output_type
        return read_media(self.multimodal_output, self._data) if is_it else []

    @property
    def outputs(self) -> list[CompletionOutput]:
        return self.request_output[0].outputs

    @property
    def prompt(self) -> str | None:
        return self.request_output[0].prompt

    @property
    def prompt_token_ids(self) -> list[int] | None:
        return self.request_output[0].prompt_token_ids

    @property
    def finished(self) -> bool:
        return self.request_output[0].finished

    def _repr_html_(self) -> str:
        """What a notebook shows: texts, players of sounds and videos, and pictures; of other tensors their shapes.

        Its size is bounded: `notebook.MAX_MEDIA_BYTES`, `MAX_ITEMS`, `MAX_TEXT_CHARS`.
        """
        times = [f"{stage.name} {stage.seconds:.2f} s" for stage in self.stage_metrics]
        names = filter(None, (f"request {self.request_id}", f"stage {self.stage_id}", self.final_output_type, *times))
        parts = [notebook.note(", ".join(names))]
        if self.error is not None:
            parts.append(notebook.paragraph(f"{type(self.error).__name__}: {self.error}"))
        parts += notebook.show_all(self.outputs, self._choice_as_html, "choices")
        return notebook.block([*parts, *self._media_as_html()])

    def _choice_as_html(self, choice: CompletionOutput) -> str:
        number = f"choice {choice.index}" if len(self.outputs) > 1 else ""
        end = "" if choice.finish_reason in ("stop", None) else f"ended by: {choice.finish_reason}"
        title = ", ".join(filter(None, (number, end)))
        return (notebook.note(title) if title else "") + (notebook.paragraph(choice.text) if choice.text else "")

    def _media_as_html(self) -> list[str]:
        tensors = {name: each for name, each in self.multimodal_output.items() if not name.startswith("file.")}
        audio = tensors.pop("audio", None)
        sounds = [] if audio is None else list(audio) if audio.ndim == 3 else [audio]
        budget = notebook.MediaBudget()
        parts: list[str] = []
        if self._num_media and self.output_format != "latent":
            tensors.pop(self._data["output_type"], None)
            parts += notebook.show_all(self.images, budget.picture, "pictures")
            if videos := self.videos:
                tracks: Sequence[torch.Tensor | None] = sounds if len(sounds) == len(videos) else [None] * len(videos)
                tracked = list(zip(videos, tracks, strict=True))
                parts += notebook.show_all(tracked, lambda it: budget.video(*it, self.fps, self.sample_rate), "videos")
                sounds = []
        parts += notebook.show_all(sounds, lambda sound: budget.sound(sound, self.sample_rate), "clips")
        others = list(tensors.items())
        return parts + notebook.show_all(others, lambda it: notebook.note(notebook.describe(*it)), "tensors")

    def __repr__(self) -> str:
        shapes = {name: tuple(tensor.shape) for name, tensor in self.multimodal_output.items()}
        media = ""
        if self._num_media and self._data["output_type"] != "audio":
            media = f", {self._data['output_type']}s=<{self._num_media} {self._data['output_format']}>"
        return (
            f"OmniRequestOutput(request_id={self.request_id!r}, stage_id={self.stage_id}, "
            f"final_output_type={self.final_output_type!r}, outputs={self.outputs!r}, multimodal_output={shapes}"
            f"{media})"
        )


def _as_request_output(request_id: str, output: StageOutput) -> RequestOutput:
    request_output = RequestOutput(
        request_id=request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        prompt_logprobs=output.prompt_logprobs,
        outputs=[CompletionOutput(**msgspec.structs.asdict(completion)) for completion in output.completions],
        finished=True,
        num_cached_tokens=output.num_cached_tokens,
    )
    vars(request_output)["multimodal_output"] = output.tensors  # older clients read it here
    return request_output
