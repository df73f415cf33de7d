# SPDX-License-Identifier: Apache-2.0
"""A page to try a served model in a browser, made with Gradio (extra `ui`).

An ordinary client of the server: it knows only HTTP, and imports nothing of a pipeline. vllm_omni finds its command and
its place in a server through the entry point `playground`.
"""

from vllm_omni.model_packages import Command, ModelPackage

PACKAGE = ModelPackage(
    commands={
        "playground": Command(
            "vllm_omni_playground.command:run_playground",
            "URL [options]",
            "a page to try the model of a running server in a browser",
        )
    },
    pages={"playground": "vllm_omni_playground.page:add_to_server"},
)
