"""The server process: uvicorn, with a limit for slow heads, and signals that let work finish.

SIGTERM, SIGINT and SIGHUP drain: the socket is closed, accepted requests are answered, and the
process ends with 0; at a second signal they are answered 503, after the pass that runs.
"""

from __future__ import annotations

import logging
import signal
import socket
from typing import Any, ClassVar

import torch
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmaccel.batch.modalities import Images, Speech
from mmaccel.serving.app import create_app
from mmaccel.serving.engine import Engine
from mmaccel.serving.routes import ImageRoute, SpeechRoute
from mmaccel.serving.settings import MAX_HEAD, ServerSettings

logger = logging.getLogger(__package__)

# seconds, as nginx: a client may lose a request on a connection that is just closed
_KEEP_ALIVE = 75


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol; closes a connection that sends no request, or goes on sending its head or
    a body that was answered, for longer than `seconds`, or twice as long.
    """

    seconds: ClassVar[float]
    _is_late = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look()

    def _look(self) -> None:
        is_served = self.cycle is not None and not self.cycle.response_complete
        is_idle = self.timeout_keep_alive_task is not None  # between two requests
        if self._is_late and not is_served and not is_idle:
            self.transport.abort()
        self._is_late = not is_served and not is_idle
        if not self.transport.is_closing():
            self.loop.call_later(self.seconds, self._look)


class Server(uvicorn.Server):
    """uvicorn's server for an engine, which the caller starts; a signal drains it."""

    def __init__(self, engine: Engine) -> None:
        settings = engine.settings
        protocol = type("Protocol", (LimitedProtocol,), {"seconds": settings.body_timeout})
        config = uvicorn.Config(
            create_app(engine),
            settings.host,
            settings.port,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=settings.max_connections,
            h11_max_incomplete_event_size=MAX_HEAD,
            timeout_keep_alive=_KEEP_ALIVE,
        )
        super().__init__(config)
        self._engine = engine

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        settings = self._engine.settings
        logger.info("serving %s at http://%s:%s/v1", settings.name, settings.host, self.port)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Drain; at the second signal, end at once."""
        if self.should_exit:
            self.servers[0].get_loop().call_soon_threadsafe(self.abort)
        self.drain()

    def drain(self) -> None:
        self.should_exit = True
        self._engine.drain()

    def abort(self) -> None:
        """Refuse what was accepted, then end."""
        self.force_exit = True
        for task in self.server_state.tasks:
            task.cancel()

    @property
    def port(self) -> int:
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port


def open_engine(settings: ServerSettings, task: str, model: str, **options: Any) -> Engine:
    """Load a model for the task "image" or "speech" and show that it can be served; options are
    fields of `Images` or `Speech` of `mmaccel.batch.modalities`, which write to no folder.
    """
    options["rows"] = min(settings.rows, settings.queue)  # parts of a text that find room together
    route: ImageRoute | SpeechRoute
    if task == "image":
        route = ImageRoute(Images(model=model, **options))
    else:
        route = SpeechRoute(Speech(model=model, **options))
    engine = Engine(route, settings)
    _warm_up(engine)
    return engine


def _warm_up(engine: Engine) -> None:
    """Run a pass of an example, which also shows whether a model can be served."""

    def stop(progress: Any) -> torch.Tensor:
        return torch.zeros_like(progress.lengths)

    route = engine.route
    body = route.body.model_validate({route.body.text_field: route.example})
    job = route.jobs(body)[0]
    joined: dict[str, Any] = {"arrivals": lambda most: [], "prefix_tree": engine.prefix_tree}
    route.serve(job, [job.request], print, rows=1, on_step=stop, **joined)


def run(engine: Engine) -> None:
    """Serve until a signal has drained the server; the log goes to standard error."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logger.setLevel(logging.INFO)
    server = Server(engine)
    hang_up = getattr(signal, "SIGHUP", signal.SIGTERM)  # Windows has none
    if signal.getsignal(hang_up) is not signal.SIG_IGN:  # as under nohup
        signal.signal(hang_up, server.handle_exit)
    engine.start()
    try:
        server.run()
    finally:
        engine.close()
