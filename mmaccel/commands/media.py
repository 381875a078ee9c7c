"""`mmaccel generate`, `speak`, `animate` and `answer`: a dataclass of flags each.

A command says which flags it has and which job it runs; `jobs/` checks them, loads the model,
decodes and writes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from os.path import isfile  # unlike Path.is_file, false for names too long for a file
from pathlib import Path
from typing import Annotated, Any

import typer

from mmaccel.checks import check_most, show
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
from mmaccel.limits import MAX_ACTORS, MAX_BATCH, MAX_IMAGES, MAX_RETRIES
from mmaccel.options import LoadOptions, SamplingOptions

LOCAL, RAY = "local", "ray"

_BATCH_ROWS = 8
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


@dataclass(frozen=True, kw_only=True)
class FileFlags:
    """Images of a prompt file.

    Attributes:
        prompt_file: of rows; None makes images of the command line.
        executor, actors: who generates.
        resume, shard, retries, max_failures, dry_run: of the job.
        as_json, json_stream: reports for programs.
    """

    executor: Annotated[str, typer.Option(help=_GENERATE_EXECUTOR)] = LOCAL
    prompt_file: Annotated[str | None, typer.Option("--prompts", help=_GENERATE_FILE)] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="of a file: generate what is missing")
    ] = False
    shard: Annotated[str | None, typer.Option(help="of a file: part i/n of its images")] = None
    actors: Annotated[int | None, typer.Option(help="of ray: how many processes")] = None
    retries: Annotated[
        int | None, typer.Option(help="of a file: tries after a failure; by default 1")
    ] = None
    max_failures: Annotated[
        int | None, typer.Option(help="of a file: end when more images failed")
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="of a file: check it, no more")] = False
    as_json: Annotated[bool, typer.Option("--json", help="of a file: JSON on stdout")] = False
    json_stream: Annotated[
        bool, typer.Option("--json-stream", help="of a file: a line of JSON per event")
    ] = False

    def check(self, single: dict[str, Any]) -> None:
        """Refuse numbers outside their domains, and options of the other way to give prompts.

        Args:
            single: options of images of the command line, by name; None, False or empty was not
                given.

        Raises:
            OptionError: with the first such option.
        """
        batch = {"--resume": self.resume, "--shard": self.shard}
        batch |= {"--retries": self.retries is not None}
        batch |= {"--max-failures": self.max_failures is not None, "--dry-run": self.dry_run}
        batch |= {"--executor": self.executor != LOCAL, "--actors": self.actors is not None}
        batch |= {"--json": self.as_json, "--json-stream": self.json_stream}
        _check_mode(self.prompt_file, single, batch)
        _check_not_negative("retries", self.retries)
        check_most(
            "--retries", self.retries or 0, MAX_RETRIES, "what failed so often will fail again"
        )
        _check_not_negative("max-failures", self.max_failures)
        _check_executor(self.executor, self.actors)

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
    """What commands share whose prompts are those of the command line or of a file."""

    model: str
    out: Path
    method: PolicyFlags
    layer: LayerFlags
    sampling: SamplingOptions
    batch_size: int | None
    file: FileFlags

    @property
    def rows(self) -> int:
        """Texts, clips or images decoded together."""
        usual = 1 if self.file.prompt_file is None else _BATCH_ROWS
        return usual if self.batch_size is None else self.batch_size

    def check_single(self, single: dict[str, Any]) -> None:
        """Check the flags of a file, see `FileFlags.check`.

        Args:
            single: options of the command line alone, by name, those of layers left out.
        """
        layers = {"--kv-cache": self.layer.kv_cache, "--attention": self.layer.attention}
        self.file.check(single | layers)

    def check_decoding(self) -> None:
        """Check how much is decoded together, and the policy.

        Raises:
            OptionError: with the first that is wrong.
        """
        shared.check_count("batch-size", self.rows, MAX_BATCH)
        self.method.read()

    def fields_of_setup(self, load: LoadOptions) -> dict[str, Any]:
        """The fields of a `mmaccel.batch.worker.Setup` that every command gives."""
        return {
            "model": self.model,
            "out": self.out,
            "policy": self.method.policy,
            "options": self.method.read(),
            "sampling": self.sampling,
            "load": load,
            "rows": self.rows,
        }


@dataclass(frozen=True, kw_only=True)
class Speak(CodecFlags, FileCommand):
    """Speak texts, each into a WAV file with a JSON file next to it: text, seed, policy, stats.

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
    batch_size: Annotated[int | None, typer.Option(help=_SPEAK_BATCH)] = None
    file: FileFlags

    def run(self) -> None:
        """Speak."""
        from mmaccel.commands.jobs.batch import run_batch
        from mmaccel.commands.jobs.codec import ListenJob, SpeechJob

        if self.file.prompt_file is not None:
            run_batch(self)
        elif self.play or self.stdout:
            ListenJob(self).run()
        else:
            SpeechJob(self).run()

    def check_texts(self) -> list[str]:
        """The texts, and options that go with them.

        Raises:
            OptionError: no text, or an option of the other way to give texts.
        """
        self.check_single({"text": self.texts, "--play": self.play, "--stdout": self.stdout})
        if self.play and self.stdout:
            raise OptionError("--play: expected it or --stdout, received both; leave one out")
        if (self.play or self.stdout) and self.batch_size is not None:
            name = "--play" if self.play else "--stdout"
            raise OptionError(
                f"--batch-size: expected none with {name}, which takes one text after the other, "
                f"received {self.batch_size}; leave it out"
            )
        if not self.texts and self.file.prompt_file is None:
            raise OptionError(
                "TEXT: expected a text to say, received none; write one, or give --prompts FILE"
            )
        return self.texts or []

    def check(self) -> None:
        """Check the flags of texts of a file.

        Raises:
            OptionError: with the first that is wrong.
        """
        from mmaccel.pipelines.text_to_speech.plan import check_call

        self.check_texts()
        self.check_decoding()
        options = {"max_seconds": self.max_seconds, "repetition_penalty": self.repetition_penalty}
        check_call([], 0, **options)

    def setup(self, load: LoadOptions) -> Any:
        """What the workers of a file need."""
        from mmaccel.batch.speech import SpeechSetup

        return SpeechSetup(
            **self.fields_of_setup(load),
            codec=self.codec,
            voice=self.voice,
            max_seconds=self.max_seconds,
            repetition_penalty=self.repetition_penalty,
        )


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
    count: Annotated[int, typer.Option(help="clips of each prompt or start")] = 1
    seed: Annotated[int | None, typer.Option(help=_ANIMATE_SEED)] = None
    batch_size: Annotated[int | None, typer.Option(help=_ANIMATE_BATCH)] = None
    file_format: Annotated[str | None, typer.Option("--format", help=_ANIMATE_FORMAT)] = None
    file: FileFlags

    def run(self) -> None:
        """Make the clips."""
        from mmaccel.commands.jobs.batch import run_batch
        from mmaccel.commands.jobs.clips import PromptedClipJob
        from mmaccel.commands.jobs.codec import ClipJob
        from mmaccel.pipelines.text_to_video.registry import reads_prompts

        if self.end is not None:
            raise OptionError(
                f"--end: expected none with {self.model}, which draws frame after frame and has "
                f"not learned to reach a given one, received {str(self.end)!r}; give --start, or "
                "say in the prompt how the clip ends"
            )
        if not reads_prompts(self.model):
            ClipJob(self).run()
        elif self.file.prompt_file is None:
            PromptedClipJob(self).run()
        else:
            run_batch(self)

    def check_starts(self) -> tuple[list[Path], str | None]:
        """The inputs as files, for a model that continues frames, and the prompt behind them.

        The last input is a prompt where it is no file, has a blank in it, and follows others.

        Raises:
            OptionError: no inputs, or an option of the other models.
        """
        others = {"--prompts": self.file.prompt_file, "--start": self.start}
        others |= {"--negative-prompt": self.negative}
        self.file.check({})
        wrong = [name for name, value in others.items() if value is not None]
        if wrong:
            raise OptionError(
                f"{wrong[0]}: expected none with {self.model}, which continues images and videos; "
                "leave it out, or take --model moving-scenes"
            )
        if not self.inputs:
            raise OptionError(
                f"FILE: expected images or videos that {self.model} continues, received none; give "
                "one, or take --model moving-scenes, which reads prompts"
            )
        files = list(self.inputs)
        prompt = None
        if len(files) > 1 and " " in files[-1].strip() and not isfile(files[-1]):
            prompt = files.pop()
        return [shared.parse_path(each) for each in files], prompt

    def check_prompts(self) -> None:
        """Check the inputs and options of a model that reads prompts.

        Raises:
            OptionError: an option of the other models or of the other way to give prompts, or a
                file in the place of a prompt.
        """
        if self.codec is not None:
            raise OptionError(
                f"--codec: expected none with {self.model}, which has its own, received "
                f"{self.codec!r}; leave it out"
            )
        if self.text_encoder is not None:
            raise OptionError(
                f"--text-encoder: expected none with {self.model}, which has its own words, "
                f"received {self.text_encoder!r}; leave it out"
            )
        self.check_single(
            {"prompt": self.inputs, "--start": self.start, "--count": self.count != 1}
        )
        files = [each for each in self.inputs or () if isfile(each)]
        if files:
            raise OptionError(
                f"PROMPT: expected prompts for {self.model}, received the file {files[0]!r}; give "
                f"a prompt and --start {files[0]}, or name a model that continues it, such as "
                "--model nvidia/Cosmos-Predict1-4B"
            )

    def check(self) -> None:
        """Check the flags of clips of a file.

        Raises:
            OptionError: with the first that is wrong.
        """
        self.check_prompts()
        self.check_decoding()

    def setup(self, load: LoadOptions) -> Any:
        """What the workers of a file need."""
        from mmaccel.batch.worker import ClipSetup
        from mmaccel.outputs.video_files import pick_format

        return ClipSetup(
            **self.fields_of_setup(load),
            negative=self.negative,
            file_format=pick_format(self.file_format),
        )


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
        int, typer.Option("--max-tokens", "--max-new-tokens", help="cut longer answers")
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
        from mmaccel.commands.jobs.answer import AnswerJob

        AnswerJob(self).run()


answer = as_command(Answer)


@dataclass(frozen=True, kw_only=True)
class Generate(MediaFlags, FileCommand):
    """Generate images. Each carries its prompt, seed, policy, versions and stats.

    With --prompts FILE (.jsonl, .csv, .txt or -), generate those of a file: see docs/batch.md.

    Guidance, temperature, top-k and top-p are by default those the model's authors recommend.
    """

    prompts: Annotated[
        list[str] | None, typer.Argument(help="without them, examples of the model")
    ] = None
    model: Annotated[str, typer.Option(help="demo model, path or hub id")] = "scenes"
    method: ImagePolicyFlags
    count: Annotated[
        int | None, typer.Option("--num-images", "-n", "--count", help=_GENERATE_COUNT)
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
        int | None, typer.Option(help="images generated together; by default 1, of a file 8")
    ] = None
    file: FileFlags

    def run(self) -> None:
        """Generate images of the command line or of a file."""
        if self.file.prompt_file is None:
            from mmaccel.commands.jobs.image import ImageJob

            ImageJob(self).run()
        else:
            from mmaccel.commands.jobs.batch import run_batch

            run_batch(self)

    def check(self) -> None:
        """Check the flags of both ways to give prompts.

        Raises:
            OptionError: with the first that is wrong.
        """
        self.check_single(
            {"prompt": self.prompts, "--num-images": self.count, "--compare": self.compare}
        )
        if self.count is not None:
            many = MAX_IMAGES // max(1, len(self.prompts or ()))
            shared.check_count("num-images", self.count, many, "a file takes more, see --prompts")
        self.sides.join()
        self.check_decoding()

    def setup(self, load: LoadOptions) -> Any:
        """What the workers of a file need."""
        from mmaccel.batch.worker import Setup

        return Setup(
            **self.fields_of_setup(load),
            decoder=self.decoder,
            size=self.sides.join(),
            negative=self.negative,
        )

    def spread_prompts(self, examples: tuple[str, ...]) -> list[str]:
        """A prompt for each image: `count` of each of the user's, or `count` of the examples."""
        if self.prompts:
            return [text for text in self.prompts for _ in range(self.count or 1)]
        return [examples[k % len(examples)] for k in range(self.count or len(examples))]


generate = as_command(Generate)


def _check_mode(prompt_file: str | None, single: dict[str, Any], batch: dict[str, Any]) -> None:
    """Refuse options for single images with a prompt file, and options of a file without one.

    Args:
        prompt_file: value of `--prompts`.
        single, batch: options by name; None, False or empty was not given.

    Raises:
        OptionError: with the first such option.
    """
    wrong = [name for name, value in (batch if prompt_file is None else single).items() if value]
    if not wrong:
        return
    if prompt_file is None:
        raise OptionError(f"{wrong[0]}: expected --prompts FILE with it; it is for prompt files")
    raise OptionError(
        f"--prompts: expected no {wrong[0]} with it, because each row of the file has its "
        "own prompt and count; leave it out, or write it into the file"
    )


def _check_not_negative(name: str, value: int | None) -> None:
    if value is not None and value < 0:
        raise OptionError(f"--{name}: expected 0 or more, received {show(value)}; 0 allows none")


def _check_executor(executor: str, actors: int | None) -> None:
    if executor not in (LOCAL, RAY):
        raise OptionError(
            f"--executor: expected {LOCAL} or {RAY}, received {executor!r}; {LOCAL} is this process"
        )
    if actors is None:
        return
    shared.check_count("actors", actors, MAX_ACTORS)
    if executor != RAY:
        raise OptionError(f"--actors: expected --executor ray with it, received {executor}; add it")
