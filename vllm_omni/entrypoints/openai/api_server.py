# SPDX-License-Identifier: Apache-2.0
"""Opens a pipeline and serves it over HTTP until the process is told to end."""

import asyncio
import logging
import signal
from argparse import Namespace
from typing import Any, NoReturn

import uvloop
import vllm.envs as envs
from vllm.entrypoints.launchers.launcher import serve_http, setup_server
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config

from vllm_omni.entrypoints.async_omni_llm import AsyncOmniLLM
from vllm_omni.entrypoints.openai import media_connector
from vllm_omni.entrypoints.openai.app import build_omni_app
from vllm_omni.entrypoints.openai.engine_client import OmniEngineClient
from vllm_omni.entrypoints.openai.memory import return_large_blocks
from vllm_omni.orchestrator.fork_server import ForkServer

logger = logging.getLogger("vllm.omni.server")

# When all requests have ended: how long clients may take to receive what is on its way to them.
_FLUSH_S = 5


def run(args: Namespace, llm_args: dict[str, Any], fork_server: ForkServer | None = None) -> None:
    """Serves a pipeline. Returns when it was told to end by SIGTERM or SIGINT, with nothing left behind.

    Args:
        args: Of `vllm serve`.
        llm_args: Keyword arguments of `AsyncOmniLLM`.
        fork_server: One that was started before, for the stages.

    Raises:
        OmniError: The pipeline cannot be started.
        OSError: The address cannot be listened on.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    return_large_blocks()
    media_connector.install(args)
    # Before the stages start: an address that is taken shall be known at once.
    address, listener = setup_server(args, reuse_port=False)
    with listener, AsyncOmniLLM(**llm_args, fork_server=fork_server) as llm:
        client = ServedEngineClient(llm, shutdown_timeout=args.shutdown_timeout, voice_map=args.voice_map)
        uvloop.run(_serve(client, address, listener, args))


class ServedEngineClient(OmniEngineClient):
    """The engine of a server that is told to end by a signal, of which vLLM's launcher heeds the first only."""

    loop: asyncio.AbstractEventLoop

    def shutdown(self, timeout: float | None = None) -> None:
        """As the base says; another signal ends the wait for running requests."""
        for sig in (signal.SIGINT, signal.SIGTERM):
            self.loop.call_soon_threadsafe(self.loop.add_signal_handler, sig, self.hurry)
        super().shutdown(timeout)


async def _serve(client: ServedEngineClient, address: str, listener: Any, args: Namespace) -> None:
    client.loop = asyncio.get_running_loop()
    app = await build_omni_app(client, args)
    logger.info("Serving %s on %s", ", ".join(client.config.output_types), address)
    log_config = get_uvicorn_log_config(args)
    uvicorn_options: dict[str, Any] = {} if log_config is None else {"log_config": log_config}
    shutdown = await serve_http(
        app,
        sock=listener,
        enable_ssl_refresh=args.enable_ssl_refresh,
        host=args.host,
        port=args.port,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=args.ssl_cert_reqs,
        ssl_ciphers=args.ssl_ciphers,
        h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
        h11_max_header_count=args.h11_max_header_count,
        timeout_graceful_shutdown=_FLUSH_S,
        **uvicorn_options,
    )
    await shutdown


def _interrupt(*_: object) -> NoReturn:
    """Ends a pipeline that is still starting; once it is served the server handles signals."""
    raise KeyboardInterrupt("terminated")
