"""Sums of stats, and pixels to PIL images."""

from __future__ import annotations

import torch

from mmaccel.pipelines.text_to_image.outputs import add_stats, to_images
from mmaccel.results import Stats


def test_stats_add_up_and_have_the_weakest_exactness() -> None:
    first = Stats("P", "bitwise", 6, 4, 5, 1, accepted=[4, 1], seconds=1.0, fallbacks=["a"])
    second = Stats("P", "relaxed", 3, 2, 2, 1, accepted=[1, 0, 1], seconds=0.5, fallbacks=["a"])
    total = add_stats([first, second])
    assert (total.tokens, total.passes, total.row_passes, total.prefill_passes) == (9, 6, 7, 2)
    assert total.accepted == [5, 1, 1]
    assert (total.exactness, total.seconds, total.fallbacks) == ("relaxed", 1.5, ["a"])


def test_pixels_round_and_keep_their_axes() -> None:
    pixels = torch.zeros(1, 3, 2, 3)
    pixels[0, 0, 1, 2] = 1.0  # red, second row, third column
    pixels[0, 2, 0, 0] = 0.5
    (image,) = to_images(pixels)
    assert image.size == (3, 2) and image.mode == "RGB"
    assert image.getpixel((2, 1)) == (255, 0, 0) and image.getpixel((0, 0)) == (0, 0, 128)


def test_stats_report_accepted_slots_and_parts_of_the_time() -> None:
    stats = Stats(
        "P", "distribution", 10, 4, 4, 1, accepted=[1, 0, 3], seconds=2.0, forward_seconds=1.5,
        pixel_seconds=0.25, branches=2, fallbacks=["a reason", "another"],
    )  # fmt: skip
    assert stats.acceptance_by_slot == [1.0, 0.75, 0.75]
    assert stats.to_dict()["kept_by_slot"] == [1.0, 0.75, 0.75]
    assert str(stats).splitlines() == [
        "tokens       10 in 4 forward passes (2.50 a pass)",
        "guidance     2 rows of a pass per row",
        "kept by slot 100 75 75 %",
        "seconds      2.25 (model 1.50, sampler 0.50, rendering 0.25)",
        "fell back    a reason",
        "fell back    another",
    ]
    assert Stats().acceptance_by_slot == [] and "0 forward passes" in str(Stats())


def test_stats_show_canvases_beside_passes_that_are_wider_than_plain_ones() -> None:
    """A pass of one canvas a row, guidance included, is a plain one."""
    plain = Stats("P", tokens=256, passes=256, row_passes=256, branches=2, canvases=512)
    wide = Stats("P", tokens=256, passes=46, row_passes=46, branches=2, canvases=354, positions=1)
    assert "canvases" not in str(plain) + plain.summary
    assert "46 forward passes of 3.8 canvases, 5.57 tokens a pass" in wide.summary
    assert add_stats([wide, plain]).canvases == wide.to_dict()["canvases"] + 512 == 866


def test_forward_passes_are_those_of_the_batch_everywhere() -> None:
    """A pass of four rows is one forward pass; tokens a pass are a row's."""
    batch = Stats(tokens=1024, passes=51, row_passes=161)
    assert "1024 tokens in 51 forward passes, 6.36 tokens a pass for each" in batch.summary
    assert "1024 in 51 forward passes (6.36 a pass for each row)" in str(batch)
