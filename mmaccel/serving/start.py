"""Opens a model for a server, and runs the server."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from mmaccel.samplers.prefix_tree import PrefixTree
from mmaccel.serving.server import serve
from mmaccel.serving.service import Service
from mmaccel.serving.settings import ServerSettings


def open_images(settings: ServerSettings, model: str, **options: Any) -> Service:
    """Load a text-to-image model and show that it can be served.

    Args:
        settings: of the server.
        model: name, folder, file or hub id.
        **options: fields of `mmaccel.batch.worker.Setup`.

    Raises:
        OptionError, UnsupportedModelError: it cannot.
    """
    from mmaccel.batch.worker import Setup
    from mmaccel.serving.images import ImageBackend

    setup = Setup(model, Path(), rows=settings.rows, **options)  # it writes to no folder
    backend = ImageBackend(setup, prefix_tree=_open_tree(settings))
    backend.warm_up()
    return Service(settings, images=backend)


def open_speech(settings: ServerSettings, model: str, **options: Any) -> Service:
    """Load a speech model and show that it can be served.

    Args:
        settings: of the server.
        model: folder or hub id.
        **options: of a `mmaccel.batch.speech.SpeechSetup`.

    Raises:
        OptionError, UnsupportedModelError: it cannot.
    """
    from mmaccel.batch.speech import SpeechSetup
    from mmaccel.serving.speech import SpeechBackend

    rows = min(settings.rows, settings.queue)  # so many parts of a text find room together
    setup = SpeechSetup(model, Path(), rows=rows, **options)
    backend = SpeechBackend(setup, prefix_tree=_open_tree(settings))
    backend.warm_up()
    return Service(settings, speech=backend)


def _open_tree(settings: ServerSettings) -> PrefixTree | None:
    """What keeps prompts for later requests; None where nothing does."""
    if not settings.prefix_cache:
        return None
    return PrefixTree(settings.prefix_cache, shared_from=settings.prefix_shared_from or None)


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
