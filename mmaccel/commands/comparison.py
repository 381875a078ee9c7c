"""The table of `mmaccel generate --compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmaccel.pipelines.text_to_image.contact_sheet import describe_difference, identical
from mmaccel.results import exactness_in

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image.outputs import ImageOutput


def print_comparison(name: str, plain: ImageOutput, made: ImageOutput, dtype: str) -> None:
    """The table: passes, tokens per pass, seconds, identical."""
    from mmaccel.commands.terminal import make_table, wide_console

    count = len(made.prompts)
    same = identical(plain, made)
    table = make_table("", *("passes", "tok/pass", "seconds", "speed-up", "identical", "promise"))
    for side_name, side in (("token by token", plain), (name, made)):
        stats = side.stats
        table.add_row(
            side_name,
            f"{stats.row_passes / count:.1f}",
            f"{stats.tokens_per_pass:.2f}",
            f"{stats.seconds / count:.2f}",
            f"{plain.stats.seconds / stats.seconds:.2f}",
            "-" if side is plain else ("yes" if same == count else f"no, {same} of {count}"),
            exactness_in(stats.exactness, dtype),
        )
    console = wide_console()
    console.print(table)
    console.print(f"{describe_difference(plain, made, dtype)}. Means over {count} images.")
