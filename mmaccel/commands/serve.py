"""`mmaccel serve`: a server with OpenAI's image and speech calls; see docs/serving.md."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.commands import options as shared
from mmaccel.commands.flags import Without, as_command
from mmaccel.commands.options import PolicyFlags, SizeFlags
from mmaccel.commands.process import resume_collector
from mmaccel.errors import MissingBackendError, OptionError
from mmaccel.limits import MAX_BATCH, MAX_PROMPT
from mmaccel.options import LoadOptions, SamplingOptions, given, option
from mmaccel.serving.settings import ServerSettings

KEYS = "MMACCEL_API_KEY"

_HELP_KEY = f"requests need this bearer key, or another one given; also in {KEYS}, with commas"
_MAX_QUEUE = 100_000
_MAX_PREFIXES = 1_000_000_000  # tokens
_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True, kw_only=True)
class SpeechFlags:
    """What a speech model takes.

    Attributes:
        codec: of the model.
        max_seconds: of an utterance.
    """

    codec: str | None = option(
        None, "of a speech model: folder or hub id of its codec; by default the authors'"
    )
    max_seconds: float | None = option(
        None,
        "of an utterance, after which it is cut; by default 30, or what the model has room for",
    )


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model: /v1/images/generations or /v1/audio/speech, /v1/models, /health, /metrics.

    Requests join the running batch. SIGTERM finishes what was accepted and ends with 0.
    """

    model: Annotated[str, typer.Option(help="demo model, path or hub id")] = "scenes"
    task: Annotated[str, typer.Option(help="image or speech")] = "image"
    server: ServerSettings
    api_key: Annotated[list[str] | None, typer.Option(help=_HELP_KEY)] = None
    method: PolicyFlags
    sampling: SamplingOptions
    sides: SizeFlags
    decoder: shared.Decoder = None
    speech: SpeechFlags
    load: Annotated[LoadOptions, Without("share_prefix")]  # its rows join a run
    threads: shared.Threads = None

    def run(self) -> None:
        """Check the flags, load the model and serve it."""
        _check_packages()
        from mmaccel.loading import place
        from mmaccel.pipelines.loading.tasks import check_task
        from mmaccel.pipelines.text_to_image.model import choose_params
        from mmaccel.samplers.sampling_params import SamplingParams
        from mmaccel.serving.start import open_service, run

        if self.task not in ("image", "speech"):
            raise OptionError(
                f"--task: expected image or speech, received {self.task!r}; choose one"
            )
        command = "generate" if self.task == "image" else "speak"
        check_task(self.model, command, is_served=True)
        _check(self.server)
        name = self.server.name or self.model
        settings = replace(self.server, name=name, api_keys=_read_keys(self.api_key))
        size = self.sides.join()
        load = place(self.load)
        shared.set_threads(self.threads)
        options = self.method.read()
        choose_params(SamplingParams(), **given(self.sampling))
        decoding: dict[str, Any] = dict(
            policy=self.method.policy, options=options, sampling=self.sampling, load=load
        )
        if self.task == "image":
            _refuse(codec=self.speech.codec)
            decoding |= {"decoder": self.decoder, "size": size}
        else:
            guidance = self.sampling.guidance_scale
            _refuse(guidance_scale=guidance, size=size, decoder=self.decoder)
            decoding |= asdict(self.speech)
        service = open_service(settings, self.task, self.model, **decoding)
        resume_collector()
        run(service)


serve = as_command(Serve)


def _check(server: ServerSettings) -> None:
    """Check the options of the server.

    Raises:
        OptionError: a value outside its domain, or an address that is not free.
    """
    shared.check_count("batch-size", server.rows, MAX_BATCH)
    shared.check_count("queue", server.queue, _MAX_QUEUE)
    shared.check_count("max-prompt", server.max_prompt, MAX_PROMPT)
    kept = {"prefix-cache": server.prefix_cache, "prefix-shared-from": server.prefix_shared_from}
    for name, tokens in kept.items():
        if not 0 <= tokens <= _MAX_PREFIXES:
            raise OptionError(
                f"--{name}: expected 0..{_MAX_PREFIXES} tokens, received {tokens}; 0 is without"
            )
    if server.prefix_shared_from and not server.prefix_cache:
        raise OptionError(
            f"--prefix-shared-from: expected prompts that are kept, received "
            f"{server.prefix_shared_from} without --prefix-cache; give both"
        )
    if not 0 <= server.port < 2**16:
        raise OptionError(f"--port: expected 0..65535, received {server.port}; 0 takes a free one")
    _check_address(server.host, server.port)
    for name, seconds in (("timeout", server.timeout), ("body-timeout", server.body_timeout)):
        if not 0 < seconds < 1e6:
            raise OptionError(f"--{name}: expected seconds above 0, received {seconds:g}")


def _read_keys(given_keys: list[str] | None) -> tuple[str, ...]:
    """The keys of the command line, else those of the environment.

    Raises:
        OptionError: an empty key.
    """
    keys = os.environ.get(KEYS, "").split(",") if given_keys is None else given_keys
    found = tuple(key.strip() for key in keys if key.strip())
    if given_keys is not None and len(found) < len(given_keys):
        raise OptionError("--api-key: expected a key, received an empty text; write one")
    return found


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
