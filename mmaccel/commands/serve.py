"""`mmaccel serve`: a server with OpenAI's image and speech calls; see docs/serving.md."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.commands import options as shared
from mmaccel.commands.flags import with_flags
from mmaccel.commands.options import PolicyFlags, SizeFlags
from mmaccel.commands.process import pause_collector, resume_collector
from mmaccel.errors import MissingBackendError, OptionError
from mmaccel.limits import MAX_BATCH, MAX_PROMPT
from mmaccel.options import LoadOptions, SamplingOptions, given

KEYS = "MMACCEL_API_KEY"

_HELP_KEY = f"requests need this bearer key, or another one given; also in {KEYS}, with commas"
_HELP_CODEC = "of a speech model: folder or hub id of its codec; by default the authors'"
_HELP_NAME = "the model's name in requests; by default as --model"
_MAX_QUEUE = 100_000
_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@with_flags
def serve(
    model: Annotated[str, typer.Option(help="demo model, path or hub id")] = "scenes",
    *,
    host: Annotated[str, typer.Option(help="0.0.0.0 listens to other machines")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one")] = 8000,
    task: Annotated[str, typer.Option(help="image or speech")] = "image",
    name: Annotated[str | None, typer.Option("--served-model-name", help=_HELP_NAME)] = None,
    batch_size: Annotated[int, typer.Option(help="images or utterances decoded at a time")] = 16,
    queue: Annotated[int, typer.Option(help="how many more may wait; then 429")] = 32,
    timeout: Annotated[float, typer.Option(help="seconds from request to answer at most")] = 600.0,
    body_timeout: Annotated[
        float, typer.Option(help="seconds that a request may take to arrive")
    ] = 10.0,
    max_prompt: Annotated[int, typer.Option(help="characters of a prompt at most")] = 4000,
    api_key: Annotated[list[str] | None, typer.Option(help=_HELP_KEY)] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="write prompts to the log")] = (
        False
    ),
    method: PolicyFlags,
    sampling: SamplingOptions,
    sides: SizeFlags,
    decoder: shared.Decoder = None,
    codec: Annotated[str | None, typer.Option(help=_HELP_CODEC)] = None,
    max_seconds: Annotated[float, typer.Option(help="of an utterance; longer ones are cut")] = 30.0,
    load: LoadOptions,
    threads: shared.Threads = None,
) -> None:
    """Serve a model: /v1/images/generations or /v1/audio/speech, /v1/models, /health, /metrics.

    Requests join the running batch. SIGTERM finishes what was accepted and ends with 0.
    """
    _check_packages()
    pause_collector()
    from mmaccel.loading import place
    from mmaccel.pipelines.text_to_image.model import choose_params
    from mmaccel.samplers.sampling_params import SamplingParams
    from mmaccel.serving.settings import ServerSettings
    from mmaccel.serving.start import open_images, open_speech, run

    if task not in ("image", "speech"):
        raise OptionError(f"--task: expected image or speech, received {task!r}; choose one")
    shared.check_count("batch-size", batch_size, MAX_BATCH)
    shared.check_count("queue", queue, _MAX_QUEUE)
    shared.check_count("max-prompt", max_prompt, MAX_PROMPT)
    if not 0 <= port < 2**16:
        raise OptionError(f"--port: expected 0..65535, received {port}; 0 takes a free one")
    _check_address(host, port)
    for option, seconds in (("timeout", timeout), ("body-timeout", body_timeout)):
        if not 0 < seconds < 1e6:
            raise OptionError(f"--{option}: expected seconds above 0, received {seconds:g}")
    keys = api_key if api_key is not None else os.environ.get(KEYS, "").split(",")
    keys = [key.strip() for key in keys if key.strip()]
    if api_key is not None and len(keys) < len(api_key):
        raise OptionError("--api-key: expected a key, received an empty text; write one")
    size = sides.join()
    load = place(load)
    shared.set_threads(threads)
    options = method.read()
    choose_params(SamplingParams(), **given(sampling))
    settings = ServerSettings(
        name=name or model,
        host=host,
        port=port,
        rows=batch_size,
        queue=queue,
        max_prompt=max_prompt,
        timeout=timeout,
        body_timeout=body_timeout,
        api_keys=tuple(keys),
        log_prompts=log_prompts,
    )
    decoding: dict[str, Any] = dict(
        policy=method.policy, options=options, params=given(sampling), load=load
    )
    if task == "image":
        _refuse(codec=codec)
        service = open_images(settings, model, decoder=decoder, size=size, **decoding)
    else:
        _refuse(guidance_scale=sampling.guidance_scale, size=size, decoder=decoder)
        service = open_speech(settings, model, codec=codec, max_seconds=max_seconds, **decoding)
    resume_collector()
    run(service)


def _refuse(**options: str | float | Path | None) -> None:
    """Refuse options of the other task."""
    for name, value in options.items():
        if value is not None:
            option = name.replace("_", "-")
            raise OptionError(
                f"--{option}: expected none for this --task, received {value}; leave it out"
            )


def _check_address(host: str, port: int) -> None:
    """Check that the server can listen, before the model is loaded.

    Raises:
        OptionError: the port is taken or not allowed, or the host is not one of this machine.
    """
    import socket

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as opened:
            if os.name == "posix":  # elsewhere it would take a port that is in use
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
    except OSError as error:
        raise OptionError(
            f"--host, --port: expected an address that is free, received {host} and {port} "
            f"({error.strerror or error}); choose another port, --port 0 takes a free one"
        ) from error


def _check_packages() -> None:
    """Check that the packages of the extra are installed, before the model is loaded."""
    from importlib.util import find_spec

    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise MissingBackendError(
            f"serve: expected {', '.join(_NEEDED)}, received no {missing[0]}; "
            'run pip install "mmaccel[serve]"'
        )
