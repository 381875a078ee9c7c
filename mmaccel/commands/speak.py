"""`mmaccel speak`: speech from texts, under any window policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmaccel.commands import options as shared
from mmaccel.commands.process import pause_collector
from mmaccel.limits import MAX_BATCH

_HELP_CODEC = "folder or hub id of the decoder of codes to sound; by default the authors'"
_HELP_SEED = "of the first text, the next has the next; by default drawn, and printed"
_HELP_SECONDS = "cut longer ones; by default 30, or as long as the model can"


def speak(
    texts: Annotated[list[str], typer.Argument(help="one file each")],
    model: Annotated[str, typer.Option(help="folder or hub id, such as HKUSTAudio/Llasa-1B")],
    codec: Annotated[str | None, typer.Option(help=_HELP_CODEC)] = None,
    policy: shared.WindowPolicy = None,
    set_fields: shared.SetFields = None,
    window: shared.Window = None,
    drafts: shared.Drafts = None,
    voice: Annotated[str | None, typer.Option(help="for models that know several")] = None,
    seed: Annotated[int | None, typer.Option(help=_HELP_SEED)] = None,
    out: shared.Out = Path("out"),
    max_seconds: Annotated[float | None, typer.Option(help=_HELP_SECONDS)] = None,
    temperature: shared.Temperature = None,
    top_k: shared.TopK = None,
    top_p: shared.TopP = None,
    min_p: shared.MinP = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is none")] = None,
    batch_size: Annotated[int, typer.Option(help="texts decoded at a time at most")] = 1,
    family: Annotated[
        str | None, typer.Option(help="llasa or orpheus; by default it is detected")
    ] = None,
    device: shared.Device = "auto",
    dtype: shared.Dtype = "auto",
    threads: shared.Threads = None,
    cuda_graphs: shared.CudaGraphs = "auto",
    fused: shared.Fused = None,
    compile: shared.Compile = None,
    trust_remote_code: shared.TrustRemoteCode = False,
    revision: shared.Revision = None,
) -> None:
    """Speak texts, each into a WAV file with a JSON file next to it: text, seed, policy, stats.

    Temperature, truncation and penalty are by default those the model's authors recommend.
    """
    pause_collector()
    from transformers.utils import logging

    from mmaccel.commands.files import check_folder, open_folder
    from mmaccel.commands.media_job import SpeechJob, choose_policy, open_pipe
    from mmaccel.loading import choose_names
    from mmaccel.pipelines.text_to_speech.pipeline import TextToSpeech
    from mmaccel.pipelines.text_to_speech.plan import check_call

    shared.check_count("batch-size", batch_size, MAX_BATCH)
    name, chosen = choose_policy(policy, window, drafts, set_fields)
    device, dtype = choose_names(device, dtype)
    shared.set_threads(threads)
    params = shared.given(
        max_seconds=max_seconds, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty,
    )  # fmt: skip
    seed, is_drawn = shared.pick_seed(seed)
    # before the model is loaded, which takes long
    check_call(texts, [seed + k for k in range(len(texts))], **params)
    check_folder(out)
    logging.disable_progress_bar()
    pipe = open_pipe(
        TextToSpeech, model, codec=codec, device=device, dtype=dtype, family=family,
        cuda_graphs=cuda_graphs, fused=shared.read_switch(fused),
        compile=shared.read_switch(compile),
        trust_remote_code=trust_remote_code, revision=revision,
    )  # fmt: skip
    job = SpeechJob(
        pipe=pipe, texts=texts, seed=seed, is_seed_drawn=is_drawn, name=name, policy=chosen,
        options=params | shared.given(voice=voice), batch_size=batch_size, out=out, model=model,
        dtype=dtype,
    )  # fmt: skip
    job.check()
    open_folder(out)
    job.run()
