"""One run of `mmaccel generate` for prompts of the command line: images, and a sheet of several.

With --compare, every batch is also generated token by token, and a table shows both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel import loading
from mmaccel.catalog import MODELS
from mmaccel.commands import options as shared
from mmaccel.commands.jobs.media import MediaJob
from mmaccel.commands.terminal import count_of, make_table, progress_bar, say, wide_console
from mmaccel.options import given
from mmaccel.outputs.image_files import (
    describe,
    image_name,
    policy_word,
    short_hash,
    write_png,
)
from mmaccel.outputs.whole_files import write_whole
from mmaccel.pipelines.call_options import DecodingOptions
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
from mmaccel.pipelines.text_to_image.model import (
    choose_params,
    encode_prompts,
    spread_negatives,
)
from mmaccel.pipelines.text_to_image.outputs import Request, join
from mmaccel.results import Stats, exactness_in
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image.outputs import ImageOutput
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage
    from mmaccel.results import Progress

_MAX_SHOWN = 64  # images on a sheet, and in memory


class ImageJob(MediaJob):
    """Images to generate.

    Attributes:
        prompts: one for each image; image k has the seed of the job and k.
        encoded: the same, encoded and checked.
        negative: negative prompt.
        params: sampling parameters.
        sheets: files that show all images.
        finished, plain: batches of images, and those token by token that they are compared with.
    """

    unit = "image"
    out: Path

    def read(self) -> None:
        """See `MediaJob`; the prompts are read with the model, which may have examples."""
        self.flags.check()
        choose_params(SamplingParams(), **given(self.flags.sampling))
        self.sheets: list[Path] = []
        self.finished: list[ImageOutput] = []
        self.plain: list[ImageOutput] = []

    def open(self) -> TextToImage:
        flags = self.flags
        return loading.open_pipeline(
            flags.model, self.load, size=flags.sides.join(), decoder=flags.decoder
        )

    @property
    def kind(self) -> str:
        return str(self.pipe.model.kind)

    def prepare(self) -> None:
        flags = self.flags
        image_model = self.pipe.image_model
        self.pipe.choose(DecodingOptions(policy=self.policy, **self.layers))
        self.params = choose_params(image_model.params, **given(flags.sampling))
        examples = MODELS[flags.model].examples if flags.model in MODELS else image_model.examples
        self.prompts = flags.spread_prompts(examples)
        (self.negative,) = spread_negatives(flags.negative, 1)
        negatives = [self.negative] * len(self.prompts)
        self.encoded = encode_prompts(image_model, self.prompts, negatives, self.params)
        Noise.from_seed([self.seed + k for k in range(len(self.prompts))], len(self.prompts))

    @property
    def n_files(self) -> int:
        return len(self.prompts)

    @property
    def written(self) -> list[Path]:
        """Images, which carry their facts, and sheets."""
        return [*self.files, *self.sheets]

    @property
    def notes(self) -> list[str]:
        return join(self.finished).stats.notes

    @property
    def rows(self) -> int:
        """Images generated together."""
        return self.flags.rows

    def run(self) -> None:
        self.choose_threads()
        super().run()

    def choose_threads(self) -> None:
        """Measure passes with several numbers of CPU threads, and take the fastest.

        It says so where that is not torch's own number. `--threads` and OMP_NUM_THREADS fix the
        number.
        """
        is_fixed = self.flags.threads is not None or is_chosen_already()
        if is_fixed or self.pipe.model.device.type != "cpu":
            return
        import torch

        own = torch.get_num_threads()
        measured = measure_threads(lambda: self.warm_up(self.policy), list_counts(own))
        fastest = choose_threads(measured, own)
        if fastest != own:
            torch.set_num_threads(fastest)
            say(
                f"threads: {fastest} of {own}, the fastest for this model now (a pass takes, with "
                f"{describe_threads(measured)}); --threads fixes their number"
            )

    def warm_up(self, policy: Any) -> float:
        """Seconds of a pass under a policy, after some that are not measured."""
        rows = min(self.rows, len(self.prompts))
        return warm_up(self.pipe, policy, self.params, self.prompts[0], rows)

    def decode(self, bar: Any) -> Stats:
        """Generate and write all images, and a sheet of several; see `MediaJob`."""
        is_compared = self.flags.compare
        plain_policy = make_plain(self.policy)
        if is_compared:
            for policy in (plain_policy, self.policy):
                self.warm_up(policy)
        others = self.batches(plain_policy, bar, {})
        for batch in self.batches(self.policy, bar, self.layers):
            shown = slice(max(0, _MAX_SHOWN - batch.first))
            if is_compared:
                other = next(others)
                self.plain.append(replace(other, images=other.images[shown]))
            self.write_batch(batch)
            self.finished.append(replace(batch, images=batch.images[shown]))
        images = join(self.finished)
        if is_compared or len(self.prompts) > 1:
            self.sheets.append(self.write_sheet(images, join(self.plain) if is_compared else None))
        return images.stats

    def report(self, stats: Stats) -> None:
        faster = ""
        if self.plain:
            plain = join(self.plain)
            print_comparison(self.name, plain, join(self.finished), self.dtype)
            if stats.seconds:
                ratio = plain.stats.seconds / stats.seconds
                faster = f", {ratio:.2f} times as fast as token by token"
        written = str(self.files[0])
        if self.sheets:
            written = f"{self.summary} in {self.out}, and {self.sheets[0]}"
        say(f"{written}: {stats.summary}{faster}")

    def batches(
        self, policy: Any, on_step: Any, layers: Mapping[str, Any]
    ) -> Iterator[ImageOutput]:
        """All images by a policy, batch by batch; an image depends on its prompt and seed alone.
        The plain side of a comparison has no methods of layers."""
        generator = ImageGenerator(self.pipe)
        settings = GenerationSettings(self.name, policy, self.params, **layers)
        for first in range(0, len(self.prompts), self.rows):
            part = slice(first, first + self.rows)
            requests = [
                Request(prompt, self.seed + first + k, k, self.negative)
                for k, prompt in enumerate(self.prompts[part])
            ]
            batch = generator.draw(
                requests, settings, self.rows, on_step, encoded=self.encoded[part]
            )
            yield replace(batch, first=first)

    def write_batch(self, batch: ImageOutput) -> None:
        """Write the images of a batch."""
        own = self.name_settings(self.settings, len(batch.prompts))
        for k, (image, prompt) in enumerate(zip(batch.images, batch.prompts)):
            seed = self.seed + batch.first + k
            facts = describe(prompt, seed, self.settings, batch, k)
            write = partial(write_png, image=image, facts=facts)
            name = image_name(seed, prompt, self.name, own)
            self.files.append(self.write(self.out / name, write))

    def write_sheet(self, images: ImageOutput, plain: ImageOutput | None) -> Path:
        """Write a sheet of the images, next to the plain ones if given; returns its path."""
        title = title_of(self.name, self.policy)
        if plain is not None:
            kind = "compare"
            sheet = draw_comparison(title, plain, images, self.dtype)
        else:
            kind = "contact"
            sheet = _draw_contact_sheet(title, images, self.dtype)
        # the keys are part of the file name, through the hash
        run = {"captions": self.prompts, "seed": self.seed}
        run |= self.name_settings(self.settings, self.rows)
        file = f"{kind}-{policy_word(self.name)}-{short_hash(run)}.png"
        save = partial(sheet.save, format="PNG")
        return self.write(self.out / file, partial(write_whole, write=save))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What an image depends on, apart from its prompt and seed; ready for JSON."""
        flags = self.flags
        return self.common_settings(
            self.params,
            weights=content_hash(self.pipe.source, flags.decoder),
            **shared.given(
                size=flags.sides.join(),
                family=flags.load.family,
                decoder=None if flags.decoder is None else str(flags.decoder),
                negative=self.negative,
            ),
        )

    @contextmanager
    def progress(self) -> Iterator[Any]:
        """A progress bar that counts tokens; yields the callback for `on_step`."""
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

        total = len(self.prompts) * self.pipe.length * (2 if self.flags.compare else 1)
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


def _draw_contact_sheet(title: str, images: ImageOutput, dtype: str) -> Any:
    """All images of a run on one sheet."""
    stats = images.stats
    count = len(images.prompts)
    passes = f"{stats.row_passes / count:.0f} forward passes{stats.of_canvases}"
    foot = f"{stats.tokens // count} tokens in {passes} each"
    return draw_sheet(
        [make_panel(title, describe_guarantee(stats, dtype), images, foot)], columns=4
    )


def print_comparison(name: str, plain: ImageOutput, images: ImageOutput, dtype: str) -> None:
    """Print passes, tokens per pass, seconds and identical images of both sides."""
    count = len(images.prompts)
    same = identical(plain, images)
    said = "yes" if same == count else f"no, {same} of {count}"
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
            "-" if side is plain else said,
            exactness_in(stats.exactness, dtype),
        )
    console = wide_console()
    console.print(table)
    console.print(
        f"{describe_difference(plain, images, dtype)}. Means over {count_of(count, 'image')}."
    )
