# SPDX-License-Identifier: Apache-2.0
"""A picture with Pipecat: `pipecat_image.py URL KEY MODEL PROMPT FILE`; the file is a PNG."""

import asyncio
import json
import sys

import aiohttp
from PIL import Image
from pipecat.frames.frames import TextFrame, URLImageRawFrame
from pipecat.services.openai.image import OpenAIImageGenService
from pipelines import run_pipeline

url, key, model, prompt, file = sys.argv[1:]


async def main() -> None:
    async with aiohttp.ClientSession() as session:
        painter = OpenAIImageGenService(
            base_url=url, api_key=key, aiohttp_session=session, settings=OpenAIImageGenService.Settings(model=model)
        )
        frames = await run_pipeline(painter, frames=[TextFrame(prompt)])
    (picture,) = (frame for frame in frames if isinstance(frame, URLImageRawFrame))
    Image.frombytes(picture.format, picture.size, picture.image).save(file)
    print(json.dumps({"url": picture.url}))


asyncio.run(main())
