# SPDX-License-Identifier: Apache-2.0
"""Several concurrent questions on an event loop, with streamed text and speech.

python examples/offline/streaming.py "Why is the sea blue?" "Who are you?"
"""

import argparse
import asyncio
import time
from collections.abc import Sequence

from vllm_omni import ARSegmentEvent, AsyncOmniLLM, CompletedEvent, ErrorEvent


async def answer(llm: AsyncOmniLLM, number: int, question: str) -> None:
    """Leaving the loop, or cancelling the task, would abort the request."""
    started, num_samples = time.perf_counter(), 0
    async for event in llm.generate({"messages": [{"role": "user", "content": question}]}):
        if isinstance(event, ErrorEvent):
            raise event.error
        if isinstance(event, ARSegmentEvent) and event.final_output_type == "text":
            print(f"[{number}] {event.text!r}", flush=True)
        elif isinstance(event, ARSegmentEvent) and "audio" in event.multimodal_output:
            if not num_samples:
                print(f"[{number}] speech after {time.perf_counter() - started:.2f} s", flush=True)
            num_samples += len(event.multimodal_output["audio"])  # float32 in [-1, 1]
        elif isinstance(event, CompletedEvent):
            print(f"[{number}] done, {num_samples} samples of speech", flush=True)


async def answer_all(llm: AsyncOmniLLM, questions: Sequence[str]) -> None:
    await asyncio.gather(*(answer(llm, number, question) for number, question in enumerate(questions)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=["Why is the sea blue?", "Who are you?"])
    parser.add_argument("--model", default="talk")
    args = parser.parse_args(argv)
    with AsyncOmniLLM(args.model) as llm:  # blocks until the pipeline is ready, so before the event loop runs
        asyncio.run(answer_all(llm, args.questions))


if __name__ == "__main__":
    main()
