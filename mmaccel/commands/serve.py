"""`mmaccel serve`: a server with OpenAI's image and speech calls; see docs/serving.md."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from mmaccel.checks import check_choice, importing
from mmaccel.commands import options as shared
from mmaccel.commands.flags import Without, as_command
from mmaccel.commands.options import PolicyFlags, SizeFlags, refuse
from mmaccel.commands.process import resume_collector
from mmaccel.errors import OptionError
from mmaccel.options import LoadOptions, SamplingOptions, given, option
from mmaccel.serving.settings import ServerSettings

KEYS = "MMACCEL_API_KEY"
_NEEDED = (
    "serve: expected fastapi, uvicorn and prometheus_client, received not all of them; run pip "
    'install "mmaccel[serve]"'
)


@dataclass(frozen=True, kw_only=True)
class SpeechFlags:
    """What a speech model takes."""

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

    model: str = option("scenes", "demo model, path or hub id")
    task: str = option("image", "image or speech")
    server: ServerSettings
    api_key: list[str] | None = option(
        None, f"requests need this bearer key, or another one given; also in {KEYS}, with commas"
    )
    method: PolicyFlags
    sampling: SamplingOptions
    sides: SizeFlags
    decoder: shared.Decoder = None
    speech: SpeechFlags
    load: Annotated[LoadOptions, Without("share_prefix")]  # its rows join a run
    threads: shared.Threads = None

    def run(self) -> None:
        with importing(_NEEDED):
            from mmaccel.serving.server import open_engine, run
        from mmaccel.loading import place
        from mmaccel.pipelines.hosts.loading.tasks import check_task
        from mmaccel.pipelines.text_to_image.model import choose_params
        from mmaccel.samplers.sampling_params import SamplingParams

        check_choice("--task", self.task, ("image", "speech"))
        image: dict[str, Any] = {"size": self.sides.join(), "decoder": self.decoder}
        decoding = image
        refused: dict[str, Any] = {"--codec": self.speech.codec}
        if self.task == "speech":
            decoding = asdict(self.speech)
            refused = {f"--{name}": value for name, value in image.items()}
            refused["--guidance-scale"] = self.sampling.guidance_scale
        refuse(refused, "for this --task")
        check_task(self.model, {"image": "generate", "speech": "speak"}[self.task], is_served=True)
        _check_address(self.server.host, self.server.port)
        name = self.server.name or self.model
        settings = replace(self.server, name=name, api_keys=_read_keys(self.api_key))
        shared.set_threads(self.threads)
        choose_params(SamplingParams(), **given(self.sampling))
        engine = open_engine(
            settings,
            self.task,
            self.model,
            policy=self.method.policy,
            options=self.method.read(),
            sampling=self.sampling,
            load=place(self.load),
            **decoding,
        )
        resume_collector()
        run(engine)


serve = as_command(Serve)


def _read_keys(keys: list[str] | None) -> tuple[str, ...]:
    """The keys of the command line, else those of the environment."""
    named = os.environ.get(KEYS, "").split(",") if keys is None else keys
    stripped = tuple(key.strip() for key in named if key.strip())
    if keys is not None and len(stripped) < len(keys):
        raise OptionError("--api-key: expected a key, received an empty text; write one")
    return stripped


def _check_address(host: str, port: int) -> None:
    """Check that the server can listen, before the model is loaded."""
    import socket

    try:
        flags = socket.AI_PASSIVE
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[
            0
        ]
        socket.create_server(address, family=family).close()
    except OSError as error:
        raise OptionError(
            f"--host, --port: expected an address that is free, received {host} and {port} "
            f"({error.strerror or error}); choose another port, --port 0 takes a free one"
        ) from error
