"""`mmaccel speak`: speech from texts, under any window policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmaccel.catalog import POLICIES
from mmaccel.commands.collector import rest_collector

_WINDOW = [name for name, entry in POLICIES.items() if entry.kind == "window"]
_HELP_POLICY = f"one of {', '.join(_WINDOW)}; by default jacobi, which is exact"
_HELP_SET = "a field of the policy as name=value, as often as needed; see mmaccel models"
_HELP_CODEC = "what turns codes into sound; by default its authors', from the hub"


def speak(
    texts: Annotated[list[str], typer.Argument(help="what is to be said, one file each")],
    model: Annotated[str, typer.Option(help="folder or hub id, such as HKUSTAudio/Llasa-1B")],
    codec: Annotated[str | None, typer.Option(help=f"folder or hub id: {_HELP_CODEC}")] = None,
    policy: Annotated[str | None, typer.Option(help=_HELP_POLICY)] = None,
    set_fields: Annotated[list[str] | None, typer.Option("--set", help=_HELP_SET)] = None,
    window: Annotated[str | None, typer.Option(help='tokens per pass, or "adaptive"')] = None,
    voice: Annotated[str | None, typer.Option(help="for models that know several")] = None,
    seed: Annotated[int, typer.Option(help="of the first text; the next has the next")] = 0,
    out: Annotated[Path, typer.Option(help="folder for the files")] = Path("out"),
    max_seconds: Annotated[
        float | None, typer.Option(help="cut longer ones; by default 30, or what there is room for")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy")] = None,
    top_k: Annotated[int | None, typer.Option(help="keep the k likeliest; 0 keeps all")] = None,
    top_p: Annotated[float | None, typer.Option(help="keep this much probability")] = None,
    min_p: Annotated[float | None, typer.Option(help="least share of the likeliest")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is none")] = None,
    batch_size: Annotated[int, typer.Option(help="texts in the making at most")] = 1,
    family: Annotated[
        str | None, typer.Option(help="llasa or orpheus; found out by itself")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    cuda_graphs: Annotated[str, typer.Option(help="auto, on or off; on needs a GPU")] = "auto",
) -> None:
    """Say texts, each into a WAV file with a JSON file beside it: text, seed, policy, stats.

    Temperature, truncation and penalty are by default what the model's authors recommend.
    """
    rest_collector()
    from mmaccel.catalog import make_policy
    from mmaccel.commands.run_setup import (
        check_count,
        check_folder,
        given,
        merge_fields,
        open_folder,
        parse_window,
    )
    from mmaccel.commands.speech_job import SpeechJob, open_speaker, run_speech
    from mmaccel.commands.terminal import Stopped
    from mmaccel.opening import parse_dtype, pick_name
    from mmaccel.pipelines.speech_plan import check_call

    check_count("batch-size", batch_size)
    options = merge_fields(given(window=parse_window(window)), set_fields)
    name, options = pick_name(policy, options, "window")
    chosen = make_policy(name, **options)
    kind = parse_dtype(dtype)
    law = given(
        max_seconds=max_seconds, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty,
    )  # fmt: skip
    check_call(texts, [seed + k for k in range(len(texts))], **law)  # loading may take minutes
    check_folder(out)
    pipe = open_speaker(model, codec, device, kind, family, cuda_graphs)
    own = law | given(voice=voice)
    job = SpeechJob(
        pipe=pipe, texts=texts, seed=seed, name=name, policy=chosen, options=own,
        batch_size=batch_size, out=out, model=model, dtype=dtype,
    )  # fmt: skip
    job.check()
    open_folder(out)
    if not run_speech(job):
        raise Stopped(f"stopped; {job.told} in {out}")
