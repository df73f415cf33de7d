# SPDX-License-Identifier: Apache-2.0
"""A page to try a served model in a browser, made with Gradio (extra `ui`).

An ordinary client of the server: it knows only HTTP, and imports nothing of a pipeline.
"""
