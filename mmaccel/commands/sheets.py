"""The sheet of the images of `mmaccel generate`, and with --compare both sides and a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mmaccel.batch.manifest import Key
from mmaccel.batch.modalities import Settings
from mmaccel.batch.prompts import Item
from mmaccel.batch.worker import Worker
from mmaccel.commands.terminal import count_of, print_rows, say
from mmaccel.outputs.image_files import policy_word, short_hash
from mmaccel.outputs.whole_files import write_whole
from mmaccel.pipelines.hosts.runner.threads import (
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
    loop_of,
    make_panel,
    make_plain,
    title_of,
)
from mmaccel.pipelines.text_to_image.outputs import ImageOutput
from mmaccel.results import Stats, add_stats, exactness_in

_MAX_SHOWN = 64  # images on a sheet, and in memory


class Sheet:
    """What is kept of the images of a run; all items are of equal settings."""

    def __init__(self, flags: Any, worker: Worker, items: Sequence[Item]) -> None:
        self._flags, self._worker, self._items = flags, worker, items
        self._shown = {item.key for item in items[:_MAX_SHOWN]}
        self._made: dict[Key, Any] = {}
        self._plain: dict[Key, Any] = {}
        self._plain_stats: list[Stats] = []

    @property
    def _settings(self) -> Settings:
        return self._worker.plan(self._items[0])

    def begin(self, reports: Any) -> Iterator[Sequence[Item]]:
        """The parts that the run has; before each of a comparison, the same is made token by
        token, without methods of layers."""
        if self._flags.threads is None:
            self._choose_threads()
        if not self._flags.compare:
            yield self._items
            return
        plain = replace(self._settings, policy=make_plain(self._settings.policy))
        for policy in (plain.policy, self._settings.policy):
            self._warm_up(policy)
        modality = replace(self._worker.modality, layers={})
        for first in range(0, len(self._items), modality.rows):
            part = self._items[first : first + modality.rows]

            def keep(item: Item, made: Any) -> None:
                self._keep(self._plain, item, made)
                reports.report("item", {})

            pipe = self._worker.pipe
            stats = modality.serve(pipe, part, plain, keep, modality.rows, reports.update)
            self._plain_stats.append(stats)
            yield part

    def keep(self, item: Item, made: Any) -> None:
        self._keep(self._made, item, made)

    def _keep(self, side: dict[Key, Any], item: Item, made: Any) -> None:
        side[item.key] = made if item.key in self._shown else replace(made, image=None)

    def finish(self, what: str, stats: Stats) -> str:
        """Write the sheet of several images, and print the table of a comparison; says what was
        written, and what the run cost.
        """
        modality = self._worker.modality
        name, policy = self._settings.name, self._settings.policy
        images = self._gather(self._made, stats)
        faster = ""
        if self._flags.compare:
            kind = "compare"
            plain = self._gather(self._plain, add_stats(self._plain_stats))
            sheet = draw_comparison(title_of(name, policy), plain, images, modality.load.dtype)
            _print_comparison(name, plain, images, modality.load.dtype)
            if stats.seconds:
                ratio = plain.stats.seconds / stats.seconds
                faster = f", {ratio:.2f} times as fast as {loop_of(plain.stats)}"
        elif len(self._items) > 1:
            kind = "contact"
            count = len(self._items)
            passes = f"{stats.row_passes / count:.0f} forward passes{stats.of_canvases}"
            note = describe_guarantee(stats, modality.load.dtype)
            foot = f"{stats.tokens // count} tokens in {passes} each"
            sheet = draw_sheet([make_panel(title_of(name, policy), note, images, foot)], columns=4)
        else:
            return f"{modality.out / self._items[0].file}: {stats.summary}"
        # the same images have the same sheet, however their policy is spelled
        own = [[item.seed, item.name.rpartition("-")[2]] for item in self._items]
        digits = short_hash({"images": own})
        file = modality.out / f"{kind}-{policy_word(name)}-{digits}.png"
        write_whole(file, partial(sheet.save, format="PNG"))
        return f"{what}, and {file}: {stats.summary}{faster}"

    def _gather(self, side: dict[Key, Any], stats: Stats) -> ImageOutput:
        made = [side[item.key] for item in self._items]
        return ImageOutput(
            [each.image for each in made[:_MAX_SHOWN]],
            torch.stack([each.tokens for each in made]),
            torch.tensor([each.passes for each in made], dtype=torch.int64),
            stats,
            [item.row.prompt for item in self._items],
        )

    def _warm_up(self, policy: Any) -> float:
        rows = min(self._worker.modality.rows, len(self._items))
        prompt = self._items[0].row.prompt
        return float(self._worker.pipe.warm_up(policy, self._settings.params, prompt, rows))

    def _choose_threads(self) -> None:
        """Measure passes with several numbers of CPU threads, and take the fastest; says so where
        that is not torch's own number. OMP_NUM_THREADS fixes it."""
        if is_chosen_already() or self._worker.pipe.model.device.type != "cpu":
            return
        own = torch.get_num_threads()
        policy = self._settings.policy
        measured = measure_threads(lambda: self._warm_up(policy), list_counts(own))
        fastest = choose_threads(measured, own)
        if fastest != own:
            torch.set_num_threads(fastest)
            say(
                f"threads: {fastest} of {own}, the fastest for this model now (a pass takes, with "
                f"{describe_threads(measured)}); --threads fixes their number"
            )


def _print_comparison(name: str, plain: ImageOutput, images: ImageOutput, dtype: str) -> None:
    count = len(images.prompts)
    same = identical(plain, images)
    said = "yes" if same == count else f"no, {same} of {count}"
    name += ", coarse drafts" * (images.stats.drafts == "coarse")
    columns = {
        "": lambda stats: loop_of(stats) if stats is plain.stats else name,
        "passes": lambda stats: f"{stats.row_passes / count:.1f}{stats.of_canvases}",
        "tok/pass": lambda stats: f"{stats.tokens_per_pass:.2f}",
        "seconds": lambda stats: f"{stats.seconds / count:.2f}",
        "speed-up": lambda stats: f"{plain.stats.seconds / stats.seconds:.2f}",
        "identical": lambda stats: "-" if stats is plain.stats else said,
        "exactness": lambda stats: exactness_in(stats.exactness, dtype),
    }
    print_rows(None, columns, (plain.stats, images.stats))
    say(f"{describe_difference(plain, images, dtype)}. Means over {count_of(count, 'image')}.")
