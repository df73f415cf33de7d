# SPDX-License-Identifier: Apache-2.0
"""A button that ends what runs, and is enabled only while something does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.events import Dependency

ENABLED, DISABLED = ({"interactive": value, "__type__": "update"} for value in (True, False))
SILENT: Any = {"show_progress": "hidden", "api_visibility": "private"}
"""Options of a listener. It is queued: addresses of files in an answer that is not lack the path of the page."""


@dataclass
class Ending:
    """What one visitor's tab says of a run that has ended. A run begins with what says that it was stopped."""

    text: str = ""


def enable_at(stop: gr.Button, triggers: Sequence[Any]) -> None:
    """Enables a button at events, to be called before what it ends is bound to them.

    The browser does it, since an answer of the server might come after the end; and it runs the functions of one event
    one after the other, each to its end.
    """
    gr.on(triggers, None, None, stop, js="() => ({interactive: true, __type__: 'update'})", **SILENT)


def connect_stop(
    stop: gr.Button,
    running: Sequence[Dependency],
    on_stop: Callable[..., Any],
    outputs: Sequence[Any],
    state: Sequence[Any] = (),
    is_running: Callable[..., bool] = lambda *_: False,
) -> None:
    """Lets a button end what runs, and disables it when that has ended.

    Args:
        on_stop: Returns the values of `outputs` that say so, a tuple if they are several.
        state: What `on_stop` and `is_running` take.
        is_running: Whether something runs when one of `running` has ended.
    """
    for one in running:
        one.then(lambda *values: ENABLED if is_running(*values) else DISABLED, list(state), stop, **SILENT)

    def end(*values: Any) -> tuple[Any, ...]:
        said = on_stop(*values)
        return DISABLED, *(said if isinstance(said, tuple) else (said,))

    stop.click(end, list(state), [stop, *outputs], cancels=list(running), **SILENT)
