# SPDX-License-Identifier: Apache-2.0
"""GET /: what this server serves, for a person in a browser, or as JSON for a program that asks for it.

It needs no key, so it names the models only to those who may list them: the name of a model may be a path.
"""

from html import escape
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, Field

from vllm_omni import __version__
from vllm_omni.entrypoints.openai.description import PipelineDescription
from vllm_omni.entrypoints.openai.media_endpoint import served_names
from vllm_omni.entrypoints.openai.middleware import PLAYGROUND_PATH, api_keys
from vllm_omni.entrypoints.openai.request_context import RequestContext

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 40rem; margin: 2rem auto; padding: 0 1rem }}</style>
</head>
<body>
<h1>{title}</h1>
<p>{models}</p>
<ul>
{endpoints}
</ul>
<p>{links}</p>
</body>
</html>
"""


class FrontPage(BaseModel):
    name: str = "vLLM-Omni"
    version: str = Field(description="Of vLLM-Omni.", examples=[__version__])
    models: list[str] | None = Field(description="The names of the model; null to those who may not list them.")
    endpoints: list[str] = Field(description="The endpoints that make something with it.")
    links: list[str] = Field(description="Further pages, relative to this one.", examples=[["docs", "health"]])


router = APIRouter()


@router.get("/", responses={HTTPStatus.OK.value: {"model": FrontPage, "content": {"text/html": {}}}})
async def front_page(raw_request: Request) -> Response:
    """What is served: a page, or JSON if the `Accept` header asks for it."""
    has_key = RequestContext.of(raw_request).owner != b""
    page = _describe(raw_request.app.state, has_key, [getattr(route, "path", "") for route in raw_request.app.routes])
    accept = raw_request.headers.get("accept", "")
    headers = {"Vary": "Accept, Authorization"}
    if "application/json" in accept and "text/html" not in accept:
        return JSONResponse(page.model_dump(), headers=headers)
    return HTMLResponse(_as_html(page), headers=headers)


def _describe(state: Any, has_key: bool, paths: list[str]) -> FrontPage:
    description: PipelineDescription = state.omni_description
    may_list = not api_keys(state.args) or state.args.public_lists or has_key
    links = [path for path in ("docs", "health") if f"/{path}" in paths]
    return FrontPage(
        version=__version__,
        models=served_names(state) if may_list else None,
        endpoints=description.endpoints,
        links=links + ([PLAYGROUND_PATH.strip("/")] if state.args.playground else []),
    )


def _as_html(page: FrontPage) -> str:
    models = "It needs an API key." if page.models is None else f"It serves {escape(', '.join(page.models))}."
    entry = '<a href="docs">{}</a>' if "docs" in page.links else "{}"
    return _PAGE.format(
        title=f"{page.name} {page.version}",
        models=models,
        endpoints="\n".join(f"<li>{entry.format(f'<code>{escape(path)}</code>')}</li>" for path in page.endpoints),
        links=" · ".join(f'<a href="{link}">{link}</a>' for link in page.links),
    )
