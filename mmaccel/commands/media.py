"""`mmaccel generate`, `speak`, `animate` and `answer`: a dataclass of flags each.

A command says which flags it has, which of them go together, and what is made of what: a modality
and rows. `mmaccel.commands.jobs` makes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from os.path import isfile  # unlike Path.is_file, false for names too long for a file
from pathlib import Path
from typing import Annotated, Any

from mmaccel.catalog import CLIP_MODELS, MODELS
from mmaccel.commands import options as shared
from mmaccel.commands.flags import Without, as_command
from mmaccel.commands.options import (
    LayerFlags,
    PolicyFlags,
    SizeFlags,
    VisualFlags,
    WindowPolicyFlags,
    refuse,
)
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_BATCH, MAX_IMAGES, MAX_KEPT, MAX_RETRIES
from mmaccel.options import LoadOptions, SamplingOptions, option

_BATCH_ROWS = 8
_MAX_FRAMES = 64  # of a start, for models that read prompts
_MAX_CONTINUED = 9  # and for all others
_NEGATIVE = "negative prompt, for models whose authors have it"
_NEGATIVE_NAMES = ("--negative-prompt", "--negative")


def _read_shard(text: str | None) -> tuple[int, int] | None:
    """The value of `--shard`: `i/n`, counted from 1."""
    if text is None:
        return None
    parsed = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text)
    index, count = (int(parsed[1]), int(parsed[2])) if parsed else (0, 0)
    if not 1 <= index <= count:
        raise OptionError(
            f"--shard: expected i/n with i in 1..n, such as 1/4, received {text!r}; the first is 1"
        )
    return index, count


@dataclass(frozen=True, kw_only=True)
class MediaFlags:
    """Flags of every command that runs a pipeline."""

    model: str
    method: PolicyFlags
    layer: LayerFlags
    seed: int | None = option(
        None, "of the first, the next has the next; by default drawn, and printed"
    )
    sampling: SamplingOptions
    load: LoadOptions
    threads: shared.Threads = None


@dataclass(frozen=True, kw_only=True)
class FileFlags:
    """Items of a prompt file; a `prompt_file` of None makes those of the command line."""

    prompt_file: str | None = option(
        None,
        "rows {id, prompt, negative, seed, n, size, policy, params}: .jsonl, .csv, .tsv, .txt or -",
        names=("--prompts",),
    )
    resume: bool = option(False, "of a file: generate what is missing")
    shard: Any = option(None, "of a file: part i/n of its images", callback=_read_shard)
    retries: int = option(1, "of a file: tries after a failure", min=0, max=MAX_RETRIES)
    max_failures: int | None = option(None, "of a file: end when more images failed", min=0)
    dry_run: bool = option(False, "of a file: check it, no more")
    as_json: bool = option(False, "of a file: JSON on stdout", names=("--json",))
    json_stream: bool = option(False, "of a file: a line of JSON per event")

    def check(self, single: dict[str, Any]) -> None:
        """Refuse options of the other way to give prompts, by name; None, False or empty was not
        given.
        """
        if self.prompt_file is None:
            for each in fields(self):
                if getattr(self, each.name) != each.default:
                    name = each.name.removeprefix("as_").replace("_", "-")
                    raise OptionError(
                        f"--{name}: expected --prompts FILE with it; it is for prompt files"
                    )
            return
        for name, value in single.items():
            if value:
                raise OptionError(
                    f"--prompts: expected no {name} with it, because each row of the file has its "
                    "own prompt and count; leave it out, or write it into the file"
                )


@dataclass(frozen=True, kw_only=True)
class FileCommand(MediaFlags):
    """Flags of commands that make items of the command line or of a prompt file. A command has
    `check`, which refuses wrong flags; `modality`, what is made; and `ask`, its own rows.
    """

    out: shared.Out = Path("out")
    batch_size: int | None = option(
        None, "made together at most; by default 1, of a file 8", min=1, max=MAX_BATCH
    )
    file: FileFlags

    compare = stdout = False

    def run(self) -> None:
        from mmaccel.commands.jobs import run

        run(self)

    def check_together(self, single: dict[str, Any]) -> None:
        """Refuse options of the other way to give prompts, and a policy that cannot be."""
        layers = {"--kv-cache": self.layer.kv_cache, "--attention": self.layer.attention}
        self.file.check(single | layers)
        self.method.read()

    def basis(self, load: LoadOptions, *names: str) -> dict[str, Any]:
        """The fields that every `Modality` has, and those of one with the same names here."""
        return {
            **{name: getattr(self, name) for name in ("model", "out", "sampling", *names)},
            "policy": self.method.policy,
            "options": self.method.read(),
            "load": load,
            "rows": self.batch_size or (_BATCH_ROWS if self.file.prompt_file else 1),
        }


@dataclass(frozen=True, kw_only=True)
class CodecFlags(FileCommand):
    """Flags of the commands whose models have a codec."""

    codec: str | None = option(None, "folder or hub id of the codec; by default the authors'")
    method: WindowPolicyFlags
    sampling: Annotated[SamplingOptions, Without("guidance_scale", "divergence_temperature")]


def _ask_for(texts: Sequence[str], seed: int, n: int = 1) -> list[Any]:
    """A row of n items for each text; every item has the seed after that of the one before."""
    from mmaccel.batch.prompts import Row

    return [Row(str(k), text, seed=seed + k * n, n=n) for k, text in enumerate(texts)]


@dataclass(frozen=True, kw_only=True)
class Speak(CodecFlags):
    """Speak texts, each into a WAV file with a JSON file next to it: text, seed, policy, passes.

    With --prompts FILE (.jsonl, .csv, .tsv, .txt or -), speak those of a file: see docs/batch.md.

    Temperature, truncation and penalty are by default those the model's authors recommend.
    """

    texts: list[str] | None = option(None, "one file each", argument=True)
    model: str = option(
        "voices", "voices, voices-masked, or a folder or hub id, such as HKUSTAudio/Llasa-1B"
    )
    method: PolicyFlags  # type: ignore[assignment]
    voice: str | None = option(None, "for models that know several")
    max_seconds: float | None = option(
        None, "cut longer ones, or refuse them on a canvas; by default 30, or what the model can"
    )
    repetition_penalty: float | None = option(None, "1 is none")
    stdout: bool = option(
        False, "write it to stdout as WAV while it is decoded, and no files: … --stdout | aplay"
    )

    def check(self) -> None:
        from mmaccel.pipelines.text_to_speech.plan import check_call

        self.check_together({"text": self.texts, "--stdout": self.stdout})
        if self.stdout:
            where = "with --stdout, which takes one text at a time"
            refuse({"--batch-size": self.batch_size}, where)
        if not self.texts and self.file.prompt_file is None:
            raise OptionError(
                "TEXT: expected a text to say, received none; write one, or give --prompts FILE"
            )
        options = {"max_seconds": self.max_seconds, "repetition_penalty": self.repetition_penalty}
        check_call(self.texts or [], 0, **options)

    def modality(self, load: LoadOptions) -> Any:
        from mmaccel.batch.modalities import Speech

        own = ("codec", "voice", "max_seconds", "repetition_penalty")
        return Speech(**self.basis(load, *own))

    def ask(self, pipe: Any, seed: int) -> list[Any]:
        return _ask_for(self.texts or [], seed)


speak = as_command(Speak)


@dataclass(frozen=True, kw_only=True)
class Animate(CodecFlags):
    """Make clips from prompts, or continue images and videos; each has a JSON file next to it.

    With --prompts FILE (.jsonl, .csv, .tsv, .txt or -), make those of a file: see docs/batch.md.

    Guidance, temperature and truncation are by default those the model's authors recommend.
    """

    inputs: list[str] | None = option(
        None,
        "prompts; where a model continues frames, files, then a prompt if it reads one",
        argument=True,
        metavar="PROMPT|FILE...",
    )
    model: str = option(
        "moving-scenes",
        "moving-scenes, or a folder or hub id such as nvidia/Cosmos-Predict1-4B",
    )
    text_encoder: str | None = option(
        None, "folder or hub id of the T5 of a model that reads prompts; by default the authors'"
    )
    start: Path | None = option(None, "image or video that clips of prompts begin with")
    negative: str | None = option(None, _NEGATIVE, names=_NEGATIVE_NAMES)
    sampling: Annotated[SamplingOptions, Without("divergence_temperature")]
    count: int = option(1, "clips of each prompt or start", min=1, max=MAX_IMAGES)
    file_format: str | None = option(
        None, "mp4, webp (lossless) or gif (256 colours)", names=("--format",)
    )

    @property
    def is_continued(self) -> bool:
        """Whether the model continues frames, and reads no prompts alone."""
        from mmaccel.pipelines.text_to_video.registry import reads_prompts

        return not reads_prompts(self.model)

    def check(self) -> None:
        from mmaccel.pipelines.hosts.loading.tasks import check_task

        model, inputs = self.model, self.inputs or []
        if self.is_continued:
            check_task(model, "animate")
            names = {"--prompts": self.file.prompt_file, "--start": self.start}
            names |= {"--negative-prompt": self.negative}
            why = "continues images and videos; take --model moving-scenes"
        else:
            names = {"--codec": self.codec, "--text-encoder": self.text_encoder}
            why = "has its own"
        refuse(names, f"with {model}, which {why}")
        count = self.count if self.count != 1 else None
        self.check_together({"prompt": inputs, "--start": self.start, "--count": count})
        if self.is_continued and not inputs:
            raise OptionError(
                f"FILE: expected images or videos that {model} continues, received none; give "
                "one, or take --model moving-scenes, which reads prompts"
            )
        for file in () if self.is_continued else filter(isfile, inputs):
            raise OptionError(
                f"PROMPT: expected prompts for {model}, received the file {file!r}; give a prompt "
                f"and --start {file}, or name a model that continues it, such as --model "
                "nvidia/Cosmos-Predict1-4B"
            )

    def modality(self, load: LoadOptions) -> Any:
        """What is made; files that clips begin with are read."""
        from mmaccel.batch.modalities import Clips, Continuations
        from mmaccel.outputs.video_files import pick_format, read_frames

        suffix = f".{pick_format(self.file_format)}"
        if not self.is_continued:
            frames = () if self.start is None else read_frames(self.start, _MAX_FRAMES)
            name = None if self.start is None else self.start.name
            basis = self.basis(load, "negative")
            return Clips(**basis, suffix=suffix, start=name, frames=frames)
        files, prompt = self._split()
        room, starts = MAX_KEPT, {}
        for file in files:
            frames = starts[file] = read_frames(shared.parse_path(file), _MAX_CONTINUED, room=room)
            room -= sum(frame.width * frame.height for frame in frames)
        basis = self.basis(load, "codec", "text_encoder")
        return Continuations(**basis, suffix=suffix, starts=starts, prompt=prompt)

    def _split(self) -> tuple[list[str], str | None]:
        """Files to continue, and the prompt behind them: an input that is no file, has a blank in
        it, and follows others."""
        files = list(self.inputs or ())
        if len(files) > 1 and " " in files[-1].strip() and not isfile(files[-1]):
            return files[:-1], files[-1]
        return files, None

    def ask(self, pipe: Any, seed: int) -> list[Any]:
        """The clips of the command line; those of every start have the same seeds."""
        from mmaccel.batch.prompts import Row

        if self.is_continued:
            files, prompt = self._split()
            text = prompt or ""
            return [Row(file, text, seed=seed, n=self.count) for file in dict.fromkeys(files)]
        known = CLIP_MODELS.get(self.model, pipe.prompted_model)
        return _ask_for(self.inputs or known.examples, seed, self.count)


animate = as_command(Animate)


@dataclass(frozen=True, kw_only=True)
class Answer(MediaFlags):
    """Answer a question about images; with --visual-tokens also draw which patches stay."""

    inputs: list[str] = option(
        ..., "image files, then the question", argument=True, metavar="IMAGE... QUESTION"
    )
    model: str = option("scenes-vqa", "scenes-vqa, or a folder or hub id of one that reads images")
    method: WindowPolicyFlags
    visual: VisualFlags
    compare: bool = option(False, "answer with all visual tokens too")
    max_tokens: int = option(
        64, "cut longer answers", names=("--max-tokens", "--max-new-tokens"), min=1
    )
    seed: int | None = option(
        None, "of the answer; by default 0, and drawn and printed above temperature 0"
    )
    sampling: Annotated[SamplingOptions, Without("guidance_scale", "divergence_temperature")]
    out: Path | None = option(
        None, "PNG of the patches that stay; by default in out/", names=("--out", "-o")
    )
    json_file: shared.JsonFile = None
    load: Annotated[LoadOptions, Without("family")]

    def run(self) -> None:
        from mmaccel.commands.answer import answer_question

        answer_question(self)


answer = as_command(Answer)


@dataclass(frozen=True, kw_only=True)
class Generate(FileCommand):
    """Generate images. Each carries its prompt, seed, policy, versions and passes.

    With --prompts FILE (.jsonl, .csv, .tsv, .txt or -), generate those of it: see docs/batch.md.

    Guidance, temperature, top-k and top-p are by default those the model's authors recommend.
    """

    prompts: list[str] | None = option(None, "without them, examples of the model", argument=True)
    model: str = option("scenes", "demo model, path or hub id")
    count: int | None = option(
        None,
        "images of each prompt, by default one; without prompts, images in all",
        names=("--num-images", "-n", "--count"),
        min=1,
        max=MAX_IMAGES,
    )
    compare: bool = option(False, "also token by token")
    negative: str | None = option(None, _NEGATIVE, names=_NEGATIVE_NAMES)
    sides: SizeFlags
    decoder: shared.Decoder = None

    def check(self) -> None:
        single = {"prompt": self.prompts, "--num-images": self.count, "--compare": self.compare}
        self.check_together(single)
        self.sides.join()

    def modality(self, load: LoadOptions) -> Any:
        from mmaccel.batch.modalities import Images

        return Images(**self.basis(load, "decoder", "negative"), size=self.sides.join())

    def ask(self, pipe: Any, seed: int) -> list[Any]:
        """`count` images of each prompt, or `count` of the examples."""
        if self.prompts:
            return _ask_for(self.prompts, seed, self.count or 1)
        examples = MODELS.get(self.model, pipe.prompted_model).examples
        count = self.count or len(examples)
        return _ask_for([examples[k % len(examples)] for k in range(count)], seed)


generate = as_command(Generate)
