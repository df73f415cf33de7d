# SPDX-License-Identifier: Apache-2.0
"""`/docs`: the description of every path, as a page that a browser shows without a network."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse

PATH = "/docs"
_FILES = "/static/"
"""vLLM's copies of Swagger's files, which it serves with `--enable-offline-docs`."""
_SCRIPT, _STYLE = f"{_FILES}swagger-ui-bundle.js", f"{_FILES}swagger-ui.css"
_SCHEMA = "/openapi.json"
_NO_ICON = "data:,"

OPEN_PATHS = (PATH, _SCRIPT, _STYLE, _SCHEMA)
"""For GET and HEAD: a browser sends no key, and they name no users or models."""


def add_docs_page(app: FastAPI, has_keys: bool) -> None:
    """Adds the page, in place of vLLM's, whose addresses do not have the path of a proxy.

    Args:
        app: Of a server with `--enable-offline-docs`.
        has_keys: Whether requests need a key: the page then asks for one to try them with.
    """
    title = app.title

    async def page() -> HTMLResponse:
        return get_swagger_ui_html(
            title=title,
            # Relative to the page.
            openapi_url=_SCHEMA.lstrip("/"),
            swagger_js_url=_SCRIPT.lstrip("/"),
            swagger_css_url=_STYLE.lstrip("/"),
            swagger_favicon_url=_NO_ICON,
        )

    app.add_api_route(PATH, page, methods=["GET"], include_in_schema=False)
    if has_keys:
        _describe_key(app)


def _describe_key(app: FastAPI) -> None:
    make_schema = app.openapi

    def openapi() -> dict[str, Any]:
        schema = make_schema()
        schema.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
        return schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's page on extending OpenAPI has it
