"""One run of `mmaccel generate` for prompts of the command line: images, and a sheet of several.

With --compare, every batch is also generated token by token, and a table shows both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.commands.files import check_written, not_written
from mmaccel.commands.options import say_drawn
from mmaccel.commands.process import Stopped
from mmaccel.commands.terminal import count_of, make_table, progress_bar, say, wide_console
from mmaccel.outputs.image_files import (
    describe,
    describe_settings,
    image_name,
    policy_word,
    short_hash,
    write_png,
)
from mmaccel.outputs.whole_files import write_whole
from mmaccel.pipelines.loading.sources import content_hash
from mmaccel.pipelines.runner.threads import (
    choose_threads,
    describe_threads,
    is_chosen_already,
    list_counts,
    measure_threads,
)
from mmaccel.pipelines.text_to_image.contact_sheet import (
    describe_difference,
    describe_guarantee,
    draw_comparison,
    draw_sheet,
    identical,
    make_panel,
    make_plain,
    title_of,
)
from mmaccel.pipelines.text_to_image.generator import GenerationSettings, ImageGenerator, warm_up
from mmaccel.pipelines.text_to_image.outputs import Request, join
from mmaccel.results import EXACT_DTYPE, exactness_in
from mmaccel.samplers.drafting.coarse import coarse_facts

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image.model import Encoded
    from mmaccel.pipelines.text_to_image.outputs import ImageOutput
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage
    from mmaccel.results import Progress
    from mmaccel.samplers.sampling_params import SamplingParams

_MAX_SHOWN = 64  # images on a sheet, and in memory


@dataclass
class ImageJob:
    """Images to generate, and those that are finished.

    Attributes:
        pipe: the model, opened by name.
        prompts: one for each image.
        encoded: the same, encoded and checked.
        seed: of the first image; image k has `seed + k`.
        name: short name of the policy.
        policy: the policy.
        params: sampling parameters.
        batch_size: images generated together.
        out: folder for the files.
        model, dtype: as given on the command line.
        extras: further given options of the model.
        decoder: file of the image decoder, where it was given.
        negative: negative prompt.
        compare: whether every batch is also generated token by token.
        layers: methods of the model's layers by slot; the plain side of a comparison has none.
        is_seed_drawn: whether the seed is said, because nobody chose it.
        files: the images that are written.
    """

    pipe: TextToImage
    prompts: list[str]
    encoded: Encoded
    seed: int
    name: str
    policy: Any
    params: SamplingParams
    batch_size: int
    out: Path
    model: str
    dtype: str
    extras: dict[str, Any] = field(default_factory=dict)
    decoder: Path | None = None
    negative: str | None = None
    compare: bool = False
    layers: Mapping[str, Any] = field(default_factory=dict)
    is_seed_drawn: bool = False
    files: list[Path] = field(default_factory=list)

    def run(self) -> None:
        """Generate and write all images, and a sheet of several; print a summary.

        Raises:
            Stopped: a signal came before the last image; the written ones remain.
            OSError: a file cannot be written; the message has the number of written images.
            Incomplete: written files are gone.
        """
        finished: list[ImageOutput] = []
        plain: list[ImageOutput] = []
        plain_policy = make_plain(self.policy)
        if self.is_seed_drawn:
            say_drawn(self.seed)
        try:
            with _progress(self) as on_step:
                if self.compare:
                    rows = min(self.batch_size, len(self.prompts))
                    for policy in (plain_policy, self.policy):
                        warm_up(self.pipe, policy, self.params, self.prompts[0], rows)
                others = self.batches(plain_policy, on_step, {})
                for batch in self.batches(self.policy, on_step, self.layers):
                    shown = slice(max(0, _MAX_SHOWN - batch.first))
                    if self.compare:
                        other = next(others)
                        plain.append(replace(other, images=other.images[shown]))
                    self.write(batch)
                    finished.append(replace(batch, images=batch.images[shown]))
            images, sheets = join(finished), []
            if self.compare or len(self.prompts) > 1:
                sheets.append(self.write_sheet(images, join(plain) if self.compare else None))
        except KeyboardInterrupt:
            raise Stopped(f"stopped; {self.state} in {self.out}") from None
        check_written([*self.files, *sheets], self.out)
        if self.compare:
            print_comparison(self.name, join(plain), images, self.dtype)
        stats, faster = images.stats, ""
        if self.compare and stats.seconds:
            ratio = sum(other.stats.seconds for other in plain) / stats.seconds
            faster = f", {ratio:.2f} times as fast as token by token"
        written = str(self.files[0])
        if sheets:
            written = f"{count_of(len(self.files), 'image')} in {self.out}, and {sheets[0]}"
        say(f"{written}: {stats.summary}{faster}")
        for note in images.stats.notes:
            say(f"note: {note}")

    @property
    def state(self) -> str:
        """How many of the images are written."""
        return f"{len(self.files)} of {len(self.prompts)} images are"

    def batches(
        self, policy: Any, on_step: Any, layers: Mapping[str, Any]
    ) -> Iterator[ImageOutput]:
        """All images by a policy, batch by batch; an image depends on its prompt and seed alone."""
        generator = ImageGenerator(self.pipe)
        settings = GenerationSettings(self.name, policy, self.params, **layers)
        for first in range(0, len(self.prompts), self.batch_size):
            part = slice(first, first + self.batch_size)
            requests = [
                Request(prompt, self.seed + first + k, k, self.negative)
                for k, prompt in enumerate(self.prompts[part])
            ]
            batch = generator.draw(
                requests, settings, self.batch_size, on_step, encoded=self.encoded[part]
            )
            yield replace(batch, first=first)

    def write(self, batch: ImageOutput) -> None:
        """Write the images of a batch."""
        for k, (image, prompt) in enumerate(zip(batch.images, batch.prompts)):
            seed = self.seed + batch.first + k
            facts = describe(prompt, seed, self.settings, batch, k)
            name = image_name(seed, prompt, self.name, self.name_settings(len(batch.prompts)))
            try:
                write_png(self.out / name, image, facts)
            except OSError as error:
                raise not_written(name, self.out, self.state, error) from error
            self.files.append(self.out / name)

    def write_sheet(self, images: ImageOutput, plain: ImageOutput | None) -> Path:
        """Write a sheet of the images, next to the plain ones if given; returns its path."""
        title = title_of(self.name, self.policy)
        if plain is not None:
            kind, sheet = "compare", draw_comparison(title, plain, images, self.dtype)
        else:
            kind, sheet = "contact", _draw_contact_sheet(title, images, self.dtype)
        # the keys are part of the file name, through the hash
        run = {"captions": self.prompts, "seed": self.seed % 2**64}
        run |= self.name_settings(self.batch_size)
        file = self.out / f"{kind}-{policy_word(self.name)}-{short_hash(run)}.png"
        try:
            write_whole(file, lambda path: sheet.save(path, format="PNG"))
        except OSError as error:
            raise not_written(file.name, self.out, self.state, error) from error
        return file

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What an image depends on, apart from its prompt and seed; ready for JSON."""
        assert self.pipe.source is not None  # it was opened by name
        return {
            "model": self.model,
            "weights": content_hash(self.pipe.source, self.decoder),
            **self.extras,
            **({} if self.decoder is None else {"decoder": str(self.decoder)}),
            **({} if self.negative is None else {"negative": self.negative}),
            "dtype": self.dtype,
            "device": str(self.pipe.model.device),
            **describe_settings(self.name, self.policy, self.params),
            **{slot: repr(method) for slot, method in self.layers.items()},
            **coarse_facts(self.policy, self.pipe.model),
        }

    def name_settings(self, rows: int) -> dict[str, Any]:
        """The settings that enter a file name, independent of how the options were spelled.

        The number of rows is one of them where images are equal up to rounding only: outside
        float32, and where an acceptance may depend on the last bit of a probability.
        """
        spelling = ("model", "policy", "policy_options", "decoder")
        own = {name: value for name, value in self.settings.items() if name not in spelling}
        own["policy"] = repr(self.policy)
        is_exact = self.dtype == EXACT_DTYPE and self.policy.exactness == "bitwise"
        return own if is_exact else {**own, "rows": rows}


def choose_threads_for(
    pipe: TextToImage,
    policy: Any,
    params: SamplingParams,
    text: str,
    rows: int,
    threads: int | None,
) -> None:
    """Measures passes of a job with several numbers of CPU threads, and takes the fastest.

    It says so where that is not torch's own number. `--threads` (`threads`) and OMP_NUM_THREADS
    settle the number.
    """
    if threads is not None or pipe.model.device.type != "cpu" or is_chosen_already():
        return
    import torch

    own = torch.get_num_threads()
    measured = measure_threads(lambda: warm_up(pipe, policy, params, text, rows), list_counts(own))
    chosen = choose_threads(measured, own)
    if chosen != own:
        torch.set_num_threads(chosen)
        say(
            f"threads: {chosen} of {own}, the fastest for this model now (a pass takes, with "
            f"{describe_threads(measured)}); --threads fixes their number"
        )


def _draw_contact_sheet(title: str, images: ImageOutput, dtype: str) -> Any:
    """All images of a run on one sheet."""
    stats, count = images.stats, len(images.prompts)
    passes = f"{stats.row_passes / count:.0f} forward passes{stats.of_canvases}"
    foot = f"{stats.tokens // count} tokens in {passes} each"
    return draw_sheet(
        [make_panel(title, describe_guarantee(stats, dtype), images, foot)], columns=4
    )


def print_comparison(name: str, plain: ImageOutput, images: ImageOutput, dtype: str) -> None:
    """Print passes, tokens per pass, seconds and identical images of both sides."""
    count, same = len(images.prompts), identical(plain, images)
    heads = ("passes", "tok/pass", "seconds", "speed-up", "identical", "exactness")
    table = make_table("", *heads)
    name += ", coarse drafts" * (images.stats.drafts == "coarse")
    for side_name, side in (("token by token", plain), (name, images)):
        stats = side.stats
        table.add_row(
            side_name,
            f"{stats.row_passes / count:.1f}{stats.of_canvases}",
            f"{stats.tokens_per_pass:.2f}",
            f"{stats.seconds / count:.2f}",
            f"{plain.stats.seconds / stats.seconds:.2f}",
            "-" if side is plain else ("yes" if same == count else f"no, {same} of {count}"),
            exactness_in(stats.exactness, dtype),
        )
    console = wide_console()
    console.print(table)
    console.print(
        f"{describe_difference(plain, images, dtype)}. Means over {count_of(count, 'image')}."
    )


@contextmanager
def _progress(job: ImageJob) -> Iterator[Any]:
    """A progress bar that counts tokens; yields the callback for `on_step`."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    total = len(job.prompts) * job.pipe.length * (2 if job.compare else 1)
    with progress_bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} tokens"),
        TimeElapsedColumn(),
    ) as bar:
        task = bar.add_task("images", total=total)

        def update(progress: Progress) -> None:
            bar.update(task, advance=int((progress.lengths - progress.previous).sum()))

        yield update
