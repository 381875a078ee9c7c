"""One run of `mmaccel generate`: make images, write them as they are finished, sum up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmaccel.batch.recipe import FILTERS
from mmaccel.commands.comparison import print_comparison
from mmaccel.commands.terminal import progress_bar
from mmaccel.outputs.image_files import (
    describe,
    image_name,
    plainly,
    short_hash,
    write_png,
    write_whole,
)
from mmaccel.pipelines.loading.sources import content_hash
from mmaccel.pipelines.text_to_image.contact_sheet import (
    describe_guarantee,
    draw_comparison,
    draw_sheet,
    make_panel,
    make_plain,
    title_of,
)
from mmaccel.pipelines.text_to_image.outputs import Request
from mmaccel.pipelines.text_to_image.pipeline import GenerationSettings, ImageGenerator, warm_up
from mmaccel.results import EXACT_DTYPE

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image.outputs import ImageOutput
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage
    from mmaccel.results import Progress
    from mmaccel.samplers.sampling_params import SamplingParams


_SHOWN = 64  # images on a sheet, and kept in memory


@dataclass
class Job:
    """What to make, and what is finished."""

    pipe: TextToImage
    captions: list[str]
    seed: int
    name: str
    policy: Any
    params: SamplingParams
    batch_size: int
    out: Path
    model: str
    dtype: str
    extras: dict[str, Any] = field(default_factory=dict)  # further settings of the model
    decoder: Path | None = None
    negative: str | None = None
    made: list[ImageOutput] = field(default_factory=list)
    plain: list[ImageOutput] = field(default_factory=list)
    kept: int = 0

    @property
    def title(self) -> str:
        """The policy's short name and its window."""
        return title_of(self.name, self.policy)

    def batches(self, policy: Any, on_step: Any) -> Iterator[ImageOutput]:
        """All images by a policy; image k has seed `seed + k` and depends on that alone."""
        generator = ImageGenerator(self.pipe)
        settings = GenerationSettings(self.name, policy, self.params)
        for first in range(0, len(self.captions), self.batch_size):
            requests = [
                Request(caption, self.seed + first + k, k, self.negative)
                for k, caption in enumerate(self.captions[first : first + self.batch_size])
            ]
            made = generator.draw(requests, settings, self.batch_size, on_step)
            yield replace(made, first=first)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What images of this run were made from beside caption and seed, ready for JSON."""
        assert self.pipe.source is not None  # it was opened by name
        return {
            "model": self.model,
            "weights": content_hash(self.pipe.source, self.decoder),
            **self.extras,
            **({} if self.decoder is None else {"decoder": str(self.decoder)}),
            **({} if self.negative is None else {"negative": self.negative}),
            "dtype": self.dtype,
            "device": str(self.pipe.model.device),
            "policy": self.name,
            "policy_options": {name: plainly(v) for name, v in vars(self.policy).items()},
            **{name: getattr(self.params, name) for name in FILTERS},
        }

    def recipe(self, rows: int) -> dict[str, Any]:
        """What file names depend on: the settings under one name each, however they were spelt.

        An image may differ with the number of rows it is made among where the promise is up to
        rounding: outside float32, and where an acceptance hangs on a probability's last bit.
        """
        spelling = ("model", "policy", "policy_options", "decoder")
        own = {name: value for name, value in self.settings.items() if name not in spelling}
        own["policy"] = repr(self.policy)
        is_exact = self.dtype == EXACT_DTYPE and self.policy.exactness == "bitwise"
        return own if is_exact else {**own, "rows": rows}

    def sheet_name(self, kind: str) -> str:
        """File name of a sheet: only one of the same images is overwritten."""
        run = {"captions": self.captions, "seed": self.seed % 2**64, **self.recipe(self.batch_size)}
        return f"{kind}-{self.name}-{short_hash(run)}.png"

    def write(self, batch: ImageOutput) -> None:
        """Write the images of a batch."""
        for k, (image, prompt) in enumerate(zip(batch.images, batch.prompts)):
            seed = self.seed + batch.first + k
            facts = describe(prompt, seed, self.settings, batch, k)
            name = image_name(seed, prompt, self.name, self.recipe(len(batch.prompts)))
            write_png(self.out / name, image, facts)
            self.kept += 1


def run_job(job: Job, *, compare: bool) -> tuple[int, bool]:
    """Make all images; with `compare`, each batch token by token too, one after the other.

    Returns:
        Number of images written, and False if Ctrl-C came before the last.
    """
    from mmaccel.pipelines.text_to_image.outputs import join

    try:
        with _progress(job, compare) as tick:
            plain_policy = make_plain(job.policy)
            if compare:
                rows = min(job.batch_size, len(job.captions))
                for policy in (plain_policy, job.policy):
                    warm_up(job.pipe, policy, job.params, job.captions[0], rows)
            plain = job.batches(plain_policy, tick) if compare else None
            for batch in job.batches(job.policy, tick):
                shown = slice(max(0, _SHOWN - batch.first))
                if plain is not None:
                    other = next(plain)
                    job.plain.append(replace(other, images=other.images[shown]))
                job.write(batch)
                job.made.append(replace(batch, images=batch.images[shown]))
        made = join(job.made)
        file = job.out / job.sheet_name("compare" if compare else "contact")
        sheet = (
            draw_comparison(job.title, join(job.plain), made, job.dtype)
            if compare
            else draw_contact_sheet(job.title, made, job.dtype)
        )
        write_whole(file, lambda path: sheet.save(path, format="PNG"))
    except KeyboardInterrupt:
        return job.kept, False
    if compare:
        print_comparison(job.name, join(job.plain), made, job.dtype)
    print(f"{job.kept} {'picture' if job.kept == 1 else 'pictures'} in {job.out}, and {file}")
    for note in made.stats.notes:
        print(f"note: {note}")
    return job.kept, True


def draw_contact_sheet(name: str, made: ImageOutput, dtype: str) -> Any:
    """All images of a run on one sheet, under the policy's name."""
    stats, count = made.stats, len(made.prompts)
    foot = f"{stats.tokens // count} tokens in {stats.row_passes / count:.0f} forward passes each"
    return draw_sheet([make_panel(name, describe_guarantee(stats, dtype), made, foot)], columns=4)


@contextmanager
def _progress(job: Job, compare: bool) -> Iterator[Any]:
    """A progress bar on stderr that counts tokens; yields what `on_step` is to be."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    total = len(job.captions) * job.pipe.length * (2 if compare else 1)
    with progress_bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} tokens"),
        TimeElapsedColumn(),
    ) as bar:
        task = bar.add_task("pictures", total=total)

        def tick(progress: Progress) -> None:
            bar.update(task, advance=int((progress.lengths - progress.previous).sum()))

        yield tick
