"""Opens a model for a server, and runs the server."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from mmaccel.samplers.prefix_tree import PrefixTree
from mmaccel.serving.engine import Backend
from mmaccel.serving.server import serve
from mmaccel.serving.service import Service
from mmaccel.serving.settings import ServerSettings


def open_service(settings: ServerSettings, task: str, model: str, **options: Any) -> Service:
    """Load a model and show that it can be served.

    Args:
        settings: of the server.
        task: "image" or "speech".
        model: name, folder, file or hub id.
        **options: fields of `mmaccel.batch.worker.Setup` or `mmaccel.batch.speech.SpeechSetup`,
            which write to no folder.

    Raises:
        OptionError, UnsupportedModelError: it cannot.
    """
    from mmaccel.batch.speech import SpeechSetup
    from mmaccel.batch.worker import Setup
    from mmaccel.serving.images import ImageBackend
    from mmaccel.serving.speech import SpeechBackend

    tree = None
    if settings.prefix_cache:
        tree = PrefixTree(settings.prefix_cache, shared_from=settings.prefix_shared_from or None)
    options["rows"] = min(settings.rows, settings.queue)  # parts of a text that find room together
    backend: Backend
    if task == "image":
        backend = ImageBackend(Setup(model, Path(), **options), tree)
    else:
        backend = SpeechBackend(SpeechSetup(model, Path(), **options), tree)
    backend.warm_up()
    return Service(settings, backend)


def run(service: Service) -> None:
    """Serve until a signal; the log goes to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in ((__package__, logging.INFO), ("uvicorn.error", logging.WARNING)):
        log = logging.getLogger(name)
        log.addHandler(handler)
        log.setLevel(level)
        log.propagate = False
    serve(service)
