"""`mmaccel generate`, `speak`, `animate` and `answer`: a dataclass of flags each.

A command says which flags it has, which of them go together, and what is made of what: a modality
and its items. `mmaccel.commands.jobs` makes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from os.path import isfile  # unlike Path.is_file, false for names too long for a file
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.catalog import CLIP_MODELS, MODELS
from mmaccel.commands import options as shared
from mmaccel.commands.flags import Without, as_command
from mmaccel.commands.options import (
    ImagePolicyFlags,
    LayerFlags,
    PolicyFlags,
    SizeFlags,
    VisualFlags,
    WindowPolicyFlags,
)
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_ACTORS, MAX_BATCH, MAX_IMAGES, MAX_KEPT, MAX_RETRIES, SEEDS
from mmaccel.options import LoadOptions, SamplingOptions

_BATCH_ROWS = 8
_MAX_FRAMES = 64  # of a start, for models that read prompts
_MAX_CONTINUED = 9  # and for all others
_GENERATE_COUNT = "images of each prompt, by default one; without prompts, images in all"
_GENERATE_EXECUTOR = "of a file: local, this process, or ray, actors on one or several machines"
_GENERATE_FILE = (
    "rows {id, prompt, negative, seed, n, size, policy, params}: .jsonl, .csv, .txt or -"
)
_GENERATE_SEED = "of the first image, the next has the next; by default drawn, and printed"
_GENERATE_NEGATIVE = "negative prompt, for models whose authors have it"
_SPEAK_MODEL = "voices, or a folder or hub id, such as HKUSTAudio/Llasa-1B"
_SPEAK_CODEC = "folder or hub id of the decoder of codes to sound; by default the authors'"
_SPEAK_SEED = "of the first text, the next has the next; by default drawn, and printed"
_SPEAK_PLAY = "play it while it is decoded, and write no files; needs sounddevice"
_SPEAK_STDOUT = "write it to stdout as WAV while it is decoded, and no files: … --stdout | aplay"
_SPEAK_BATCH = "texts decoded at a time at most; by default 1, of a file 8"
_SPEAK_SECONDS = "cut longer ones; by default 30, or as long as the model can"
_ANIMATE_CODEC = "folder or hub id of the decoder of tokens to frames; by default the authors'"
_ANIMATE_SEED = "of a start's first clip, the next has the next; by default drawn, and printed"
_ANIMATE_FORMAT = "mp4, webp (lossless) or gif (256 colours)"
_ANIMATE_INPUTS = "prompts; where a model continues frames, files, then a prompt if it reads one"
_ANIMATE_TEXT = "folder or hub id of the T5 of a model that reads prompts; by default the authors'"
_ANIMATE_MODEL = "moving-scenes, or a folder or hub id such as nvidia/Cosmos-Predict1-4B"
_ANIMATE_START = "image or video that clips of prompts begin with"
_ANIMATE_END = "image or video that clips end with; no model here has learned to reach one"
_ANIMATE_BATCH = "clips decoded at a time at most; by default 1, of a file 8"
_ANSWER_INPUTS = "image files, then the question"
_ANSWER_MODEL = "scenes-vqa, or a folder or hub id of a vision-language model"
_ANSWER_COMPARE = "answer with all visual tokens too"
_ANSWER_SEED = "of the answer; by default 0, and drawn and printed above temperature 0"
_ANSWER_OUT = "PNG of the patches that stay; by default in out/"


@dataclass(frozen=True, kw_only=True)
class MediaFlags:
    """Flags of every command that runs a pipeline."""

    model: str
    method: PolicyFlags
    layer: LayerFlags
    seed: int | None = None
    sampling: SamplingOptions
    load: LoadOptions
    threads: shared.Threads = None


@dataclass(frozen=True, kw_only=True)
class CodecFlags(MediaFlags):
    """Flags of the commands whose models have a codec."""

    method: WindowPolicyFlags
    sampling: Annotated[SamplingOptions, Without("guidance_scale", "divergence_temperature")]
    out: shared.Out = Path("out")


class Executor(StrEnum):
    """Who makes the items of a file: this process, or Ray's actors."""

    local = "local"
    ray = "ray"


@dataclass(frozen=True, kw_only=True)
class FileFlags:
    """Items of a prompt file; a `prompt_file` of None makes those of the command line."""

    executor: Annotated[Executor, typer.Option(help=_GENERATE_EXECUTOR)] = Executor.local
    prompt_file: Annotated[str | None, typer.Option("--prompts", help=_GENERATE_FILE)] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="of a file: generate what is missing")
    ] = False
    shard: Annotated[str | None, typer.Option(help="of a file: part i/n of its images")] = None
    actors: Annotated[
        int | None, typer.Option(help="of ray: how many processes", min=1, max=MAX_ACTORS)
    ] = None
    retries: Annotated[
        int | None,
        typer.Option(help="of a file: tries after a failure; by default 1", min=0, max=MAX_RETRIES),
    ] = None
    max_failures: Annotated[
        int | None, typer.Option(help="of a file: end when more images failed", min=0)
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="of a file: check it, no more")] = False
    as_json: Annotated[bool, typer.Option("--json", help="of a file: JSON on stdout")] = False
    json_stream: Annotated[
        bool, typer.Option("--json-stream", help="of a file: a line of JSON per event")
    ] = False

    def check(self, single: dict[str, Any]) -> None:
        """Refuse options of the other way to give prompts.

        Args:
            single: options of items of the command line, by name; None, False or empty was not
                given.

        Raises:
            OptionError: with the first such option.
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
        if self.actors is not None and self.executor is not Executor.ray:
            raise OptionError("--actors: expected --executor ray with it, received none; add it")
        self.read_shard()

    def read_shard(self) -> tuple[int, int] | None:
        """The value of `--shard`: `i/n`, counted from 1.

        Raises:
            OptionError: anything else.
        """
        if self.shard is None:
            return None
        found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", self.shard)
        index, count = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1 <= index <= count:
            raise OptionError(
                f"--shard: expected i/n with i in 1..n, such as 1/4, received {self.shard!r}; the "
                "first is 1"
            )
        return index, count


class FileCommand:
    """What commands share that make items of the command line or of a prompt file.

    A command has `check`, which refuses wrong flags before any work; `modality`, what is made; and
    `items`, those of the command line.
    """

    model: str
    out: Path
    method: PolicyFlags
    layer: LayerFlags
    sampling: SamplingOptions
    batch_size: int | None
    file: FileFlags
    compare: bool = False

    def run(self) -> None:
        """Make the items."""
        from mmaccel.commands.jobs import run

        run(self)

    @property
    def rows(self) -> int:
        """Items made together."""
        usual = 1 if self.file.prompt_file is None else _BATCH_ROWS
        return usual if self.batch_size is None else self.batch_size

    def check_together(self, single: dict[str, Any]) -> None:
        """Refuse options of the other way to give prompts, see `FileFlags.check`, and a policy that
        cannot be.

        Args:
            single: options of the command line alone by name, those of layers left out.

        Raises:
            OptionError: with the first that is wrong.
        """
        layers = {"--kv-cache": self.layer.kv_cache, "--attention": self.layer.attention}
        self.file.check(single | layers)
        self.method.read()

    def basis(self, load: LoadOptions) -> dict[str, Any]:
        """The fields that every `mmaccel.batch.modalities.Modality` has."""
        return {
            "model": self.model,
            "out": self.out,
            "policy": self.method.policy,
            "options": self.method.read(),
            "sampling": self.sampling,
            "load": load,
            "rows": self.rows,
        }

    def open_sound(self) -> Any:
        """What opens a place for sound where no files are written, else None."""
        return None


def _make_items(texts: Sequence[str], seed: int, suffix: str) -> list[Any]:
    """An item for each text; item k has the seed `seed` + k."""
    from mmaccel.batch.prompts import Item, Row

    rows = {text: Row(str(k), text) for k, text in enumerate(dict.fromkeys(texts))}
    return [Item(rows[text], k, (seed + k) % SEEDS, suffix) for k, text in enumerate(texts)]


@dataclass(frozen=True, kw_only=True)
class Speak(CodecFlags, FileCommand):
    """Speak texts, each into a WAV file with a JSON file next to it: text, seed, policy, passes.

    With --prompts FILE (.jsonl, .csv, .txt or -), speak those of a file: see docs/batch.md.

    Temperature, truncation and penalty are by default those the model's authors recommend.
    """

    texts: Annotated[list[str] | None, typer.Argument(help="one file each")] = None
    model: Annotated[str, typer.Option(help=_SPEAK_MODEL)] = "voices"
    codec: Annotated[str | None, typer.Option(help=_SPEAK_CODEC)] = None
    seed: Annotated[int | None, typer.Option(help=_SPEAK_SEED)] = None
    voice: Annotated[str | None, typer.Option(help="for models that know several")] = None
    max_seconds: Annotated[float | None, typer.Option(help=_SPEAK_SECONDS)] = None
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is none")] = None
    play: Annotated[bool, typer.Option("--play", help=_SPEAK_PLAY)] = False
    stdout: Annotated[bool, typer.Option("--stdout", help=_SPEAK_STDOUT)] = False
    batch_size: Annotated[int | None, typer.Option(help=_SPEAK_BATCH, min=1, max=MAX_BATCH)] = None
    file: FileFlags

    def check(self) -> None:
        from mmaccel.pipelines.text_to_speech.plan import check_call

        self.check_together({"text": self.texts, "--play": self.play, "--stdout": self.stdout})
        if self.play and self.stdout:
            raise OptionError("--play: expected it or --stdout, received both; leave one out")
        if (self.play or self.stdout) and self.batch_size is not None:
            raise OptionError(
                f"--batch-size: expected none with --{'play' if self.play else 'stdout'}, which "
                f"takes one text after the other, received {self.batch_size}; leave it out"
            )
        if not self.texts and self.file.prompt_file is None:
            raise OptionError(
                "TEXT: expected a text to say, received none; write one, or give --prompts FILE"
            )
        options = {"max_seconds": self.max_seconds, "repetition_penalty": self.repetition_penalty}
        check_call(self.texts or [], 0, **options)

    def modality(self, load: LoadOptions) -> Any:
        """What is made."""
        from mmaccel.batch.modalities import Speech

        return Speech(
            **self.basis(load),
            codec=self.codec,
            voice=self.voice,
            max_seconds=self.max_seconds,
            repetition_penalty=self.repetition_penalty,
        )

    def items(self, pipe: Any, seed: int) -> list[Any]:
        """The texts of the command line."""
        return _make_items(self.texts or [], seed, ".wav")

    def open_sound(self) -> Any:
        from mmaccel.commands.jobs import open_sound

        return open_sound(self.play) if self.play or self.stdout else None


speak = as_command(Speak)


@dataclass(frozen=True, kw_only=True)
class Animate(CodecFlags, FileCommand):
    """Make clips from prompts, or continue images and videos; each has a JSON file next to it.

    With --prompts FILE (.jsonl, .csv, .txt or -), make those of a file: see docs/batch.md.

    Guidance, temperature and truncation are by default those the model's authors recommend.
    """

    inputs: Annotated[
        list[str] | None, typer.Argument(help=_ANIMATE_INPUTS, metavar="PROMPT|FILE...")
    ] = None
    model: Annotated[str, typer.Option(help=_ANIMATE_MODEL)] = "moving-scenes"
    codec: Annotated[str | None, typer.Option(help=_ANIMATE_CODEC)] = None
    text_encoder: Annotated[str | None, typer.Option(help=_ANIMATE_TEXT)] = None
    start: Annotated[
        Path | None, typer.Option(help=_ANIMATE_START, parser=shared.parse_path, metavar="FILE")
    ] = None
    end: Annotated[Path | None, typer.Option(help=_ANIMATE_END, metavar="FILE", hidden=True)] = None
    negative: Annotated[
        str | None, typer.Option("--negative-prompt", "--negative", help=_GENERATE_NEGATIVE)
    ] = None
    sampling: Annotated[SamplingOptions, Without("divergence_temperature")]
    count: Annotated[
        int, typer.Option(help="clips of each prompt or start", min=1, max=MAX_IMAGES)
    ] = 1
    seed: Annotated[int | None, typer.Option(help=_ANIMATE_SEED)] = None
    batch_size: Annotated[int | None, typer.Option(help=_ANIMATE_BATCH, min=1, max=MAX_BATCH)] = (
        None
    )
    file_format: Annotated[str | None, typer.Option("--format", help=_ANIMATE_FORMAT)] = None
    file: FileFlags

    @property
    def is_continued(self) -> bool:
        """Whether the model continues frames, and reads no prompts alone."""
        from mmaccel.pipelines.text_to_video.registry import reads_prompts

        return not reads_prompts(self.model)

    def check(self) -> None:
        if self.end is not None:
            raise OptionError(
                f"--end: expected none with {self.model}, which draws frame after frame and has "
                f"not learned to reach a given one, received {str(self.end)!r}; give --start, or "
                "say in the prompt how the clip ends"
            )
        if self.is_continued:
            names = {"--prompts": self.file.prompt_file, "--start": self.start}
            names |= {"--negative-prompt": self.negative}
            remedy = "continues images and videos; leave it out, or take --model moving-scenes"
        else:
            names = {"--codec": self.codec, "--text-encoder": self.text_encoder}
            remedy = "has its own; leave it out"
        for name, value in names.items():
            if value is not None:
                raise OptionError(
                    f"{name}: expected none with {self.model}, received {str(value)!r}, as it "
                    f"{remedy}"
                )
        count = self.count if self.count != 1 else None
        self.check_together({"prompt": self.inputs, "--start": self.start, "--count": count})
        if self.is_continued and not self.inputs:
            raise OptionError(
                f"FILE: expected images or videos that {self.model} continues, received none; give "
                "one, or take --model moving-scenes, which reads prompts"
            )
        files = [] if self.is_continued else [each for each in self.inputs or () if isfile(each)]
        if files:
            raise OptionError(
                f"PROMPT: expected prompts for {self.model}, received the file {files[0]!r}; give "
                f"a prompt and --start {files[0]}, or name a model that continues it, such as "
                "--model nvidia/Cosmos-Predict1-4B"
            )

    def modality(self, load: LoadOptions) -> Any:
        """What is made; files that clips begin with are read."""
        from mmaccel.batch.modalities import Clips, Continuations
        from mmaccel.outputs.video_files import pick_format, read_frames

        basis = self.basis(load) | {"suffix": f".{pick_format(self.file_format)}"}
        if not self.is_continued:
            frames = () if self.start is None else read_frames(self.start, _MAX_FRAMES)
            name = None if self.start is None else self.start.name
            return Clips(**basis, negative=self.negative, start=name, frames=frames)
        files, prompt = self._split()
        room, starts = MAX_KEPT, {}
        for file in files:
            frames = starts[file] = read_frames(shared.parse_path(file), _MAX_CONTINUED, room=room)
            room -= sum(frame.width * frame.height for frame in frames)
        return Continuations(
            **basis, codec=self.codec, text_encoder=self.text_encoder, starts=starts, prompt=prompt
        )

    def _split(self) -> tuple[list[str], str | None]:
        """Files to continue, and the prompt behind them: an input that is no file, has a blank in
        it, and follows others."""
        files = list(self.inputs or ())
        if len(files) > 1 and " " in files[-1].strip() and not isfile(files[-1]):
            return files[:-1], files[-1]
        return files, None

    def items(self, pipe: Any, seed: int) -> list[Any]:
        """The clips of the command line; those of every start have the same seeds."""
        from mmaccel.batch.prompts import Item, Row
        from mmaccel.outputs.video_files import pick_format

        suffix = f".{pick_format(self.file_format)}"
        if self.is_continued:
            files, prompt = self._split()
            rows = [Row(file, prompt or "") for file in dict.fromkeys(files)]
            return [
                Item(row, k, (seed + k) % SEEDS, suffix) for row in rows for k in range(self.count)
            ]
        known = CLIP_MODELS.get(self.model, pipe.prompted_model)
        texts = self.inputs or known.examples
        return _make_items([text for text in texts for _ in range(self.count)], seed, suffix)


animate = as_command(Animate)


@dataclass(frozen=True, kw_only=True)
class Answer(MediaFlags):
    """Answer a question about images; with --visual-tokens also draw which patches stay."""

    inputs: Annotated[list[str], typer.Argument(help=_ANSWER_INPUTS, metavar="IMAGE... QUESTION")]
    model: Annotated[str, typer.Option(help=_ANSWER_MODEL)] = "scenes-vqa"
    method: WindowPolicyFlags
    visual: VisualFlags
    compare: Annotated[bool, typer.Option("--compare", help=_ANSWER_COMPARE)] = False
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "--max-new-tokens", help="cut longer answers", min=1)
    ] = 64
    seed: Annotated[int | None, typer.Option(help=_ANSWER_SEED)] = None
    sampling: Annotated[SamplingOptions, Without("guidance_scale", "divergence_temperature")]
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help=_ANSWER_OUT, parser=shared.parse_path, metavar="FILE"),
    ] = None
    json_file: shared.JsonFile = None
    load: Annotated[LoadOptions, Without("family")]

    def run(self) -> None:
        """Answer."""
        from mmaccel.commands.answer import answer_question

        answer_question(self)


answer = as_command(Answer)


@dataclass(frozen=True, kw_only=True)
class Generate(MediaFlags, FileCommand):
    """Generate images. Each carries its prompt, seed, policy, versions and passes.

    With --prompts FILE (.jsonl, .csv, .txt or -), generate those of a file: see docs/batch.md.

    Guidance, temperature, top-k and top-p are by default those the model's authors recommend.
    """

    prompts: Annotated[
        list[str] | None, typer.Argument(help="without them, examples of the model")
    ] = None
    model: Annotated[str, typer.Option(help="demo model, path or hub id")] = "scenes"
    method: ImagePolicyFlags
    count: Annotated[
        int | None,
        typer.Option("--num-images", "-n", "--count", help=_GENERATE_COUNT, min=1, max=MAX_IMAGES),
    ] = None
    seed: Annotated[int | None, typer.Option(help=_GENERATE_SEED)] = None
    out: shared.Out = Path("out")
    compare: Annotated[bool, typer.Option("--compare", help="also token by token")] = False
    negative: Annotated[
        str | None, typer.Option("--negative-prompt", "--negative", help=_GENERATE_NEGATIVE)
    ] = None
    sides: SizeFlags
    decoder: shared.Decoder = None
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="images generated together; by default 1, of a file 8", min=1, max=MAX_BATCH
        ),
    ] = None
    file: FileFlags

    def check(self) -> None:
        single = {"prompt": self.prompts, "--num-images": self.count, "--compare": self.compare}
        self.check_together(single)
        if self.count is not None:
            many = MAX_IMAGES // max(1, len(self.prompts or ()))
            shared.check_count("num-images", self.count, many, "a file takes more, see --prompts")
        self.sides.join()

    def modality(self, load: LoadOptions) -> Any:
        """What is made."""
        from mmaccel.batch.modalities import Images

        return Images(
            **self.basis(load),
            decoder=self.decoder,
            size=self.sides.join(),
            negative=self.negative,
        )

    def items(self, pipe: Any, seed: int) -> list[Any]:
        """`count` images of each prompt, or `count` of the examples."""
        if self.prompts:
            texts = [text for text in self.prompts for _ in range(self.count or 1)]
        else:
            examples = MODELS.get(self.model, pipe.prompted_model).examples
            texts = [examples[k % len(examples)] for k in range(self.count or len(examples))]
        return _make_items(texts, seed, ".png")


generate = as_command(Generate)
