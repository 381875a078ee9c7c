"""`mmaccel speak`: speech from texts, under any window policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmaccel.commands import options as shared
from mmaccel.commands.flags import Without, with_flags
from mmaccel.commands.options import LayerFlags, WindowPolicyFlags
from mmaccel.commands.process import pause_collector
from mmaccel.limits import MAX_BATCH
from mmaccel.options import LoadOptions, SamplingOptions, given

_HELP_CODEC = "folder or hub id of the decoder of codes to sound; by default the authors'"
_HELP_SEED = "of the first text, the next has the next; by default drawn, and printed"
_HELP_SECONDS = "cut longer ones; by default 30, or as long as the model can"


@with_flags
def speak(
    texts: Annotated[list[str], typer.Argument(help="one file each")],
    *,
    model: Annotated[str, typer.Option(help="folder or hub id, such as HKUSTAudio/Llasa-1B")],
    codec: Annotated[str | None, typer.Option(help=_HELP_CODEC)] = None,
    method: WindowPolicyFlags,
    layer: LayerFlags,
    voice: Annotated[str | None, typer.Option(help="for models that know several")] = None,
    seed: Annotated[int | None, typer.Option(help=_HELP_SEED)] = None,
    out: shared.Out = Path("out"),
    max_seconds: Annotated[float | None, typer.Option(help=_HELP_SECONDS)] = None,
    sampling: Annotated[SamplingOptions, Without("guidance_scale")],
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is none")] = None,
    batch_size: Annotated[int, typer.Option(help="texts decoded at a time at most")] = 1,
    load: LoadOptions,
    threads: shared.Threads = None,
) -> None:
    """Speak texts, each into a WAV file with a JSON file next to it: text, seed, policy, stats.

    Temperature, truncation and penalty are by default those the model's authors recommend.
    """
    pause_collector()
    from mmaccel.commands.files import check_folder, open_folder
    from mmaccel.commands.media_job import SpeechJob, open_pipe
    from mmaccel.loading import place
    from mmaccel.pipelines.text_to_speech.pipeline import TextToSpeech
    from mmaccel.pipelines.text_to_speech.plan import check_call

    shared.check_count("batch-size", batch_size, MAX_BATCH)
    name, policy = method.choose("window")
    layers = layer.read()
    load = place(load)
    shared.set_threads(threads)
    options = given(sampling) | shared.given(
        max_seconds=max_seconds, repetition_penalty=repetition_penalty
    )
    seed, is_drawn = shared.pick_seed(seed)
    # before the model is loaded, which takes long
    check_call(texts, [seed + k for k in range(len(texts))], **options)
    check_folder(out)
    job = SpeechJob(
        pipe=open_pipe(TextToSpeech, model, load, codec),
        texts=texts,
        seed=seed,
        is_seed_drawn=is_drawn,
        name=name,
        policy=policy,
        options=options | shared.given(voice=voice),
        layers=layers,
        batch_size=batch_size,
        out=out,
        model=model,
        dtype=load.dtype,
    )
    job.check()
    open_folder(out)
    job.run()
