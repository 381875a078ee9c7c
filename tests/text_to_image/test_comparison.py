"""What `--compare` says about two sides is true, and sheets show images as they are."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from mmaccel.pipelines.text_to_image.contact_sheet import (
    Panel,
    describe_difference,
    describe_guarantee,
    draw_sheet,
    identical,
)
from mmaccel.pipelines.text_to_image.outputs import ImageOutput
from mmaccel.results import Exactness, Stats


def side(tokens: list[list[int]]) -> ImageOutput:
    return ImageOutput([], torch.tensor(tokens), torch.ones(len(tokens)).long(), Stats(), [])


def test_an_image_is_identical_only_if_every_token_is() -> None:
    plain = side([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert identical(plain, plain) == 3
    assert identical(plain, side([[1, 2, 3], [4, 0, 6], [9, 8, 7]])) == 1
    assert identical(plain, side([[1, 2, 0], [4, 5, 0], [0, 8, 9]])) == 0


@pytest.mark.parametrize(
    ("same", "count", "exactness", "said"),
    [
        (1, 1, "relaxed", "The same image, token for token"),
        (7, 8, "bitwise", "7 of 8 images identical: bitwise was guaranteed: please report this"),
        (0, 8, "distribution", "0 of 8 images identical: other samples of the same dist"),
    ],
)
def test_verdict(same: int, count: int, exactness: Exactness, said: str) -> None:
    plain, made = side([[1, 2]] * count), side([[1, 2]] * same + [[1, 0]] * (count - same))
    made.stats.exactness = exactness
    assert describe_difference(plain, made, "float32").startswith(said)


def test_a_dtype_that_rounds_is_not_reported_as_a_defect() -> None:
    plain = side([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    made = side([[1, 2, 3, 4], [1, 0, 3, 0], [1, 2, 3, 0]])
    assert describe_difference(plain, made, "bfloat16") == (
        "1 of 3 images identical, the others on average up to token 2: bfloat16 rounds "
        "differently in wider passes, float32 keeps the guarantee"
    )
    assert describe_difference(plain, plain, "bfloat16") == "The same images, token for token"


def test_the_guarantee_of_a_run_is_described() -> None:
    exact = Stats(exactness="bitwise")
    assert describe_guarantee(exact, "float32") == "bitwise: same seed, same tokens"
    spent = Stats(exactness="relaxed", tokens=200, total_variation=25.0)
    assert describe_guarantee(spent, "float32") == "relaxed: total variation 0.125 per token"
    fewer = Stats(exactness="relaxed", reference="the model on 5 of 9 visual tokens", tokens=1)
    assert describe_guarantee(fewer, "float32") == f"relaxed: {fewer.reference}"
    rounded = "same seed, same tokens up to rounding (float16)"
    assert describe_guarantee(Stats(exactness="bitwise"), "float16") == rounded
    other = Stats(exactness="distribution")
    assert describe_guarantee(other, "float16") == describe_guarantee(other, "float32")


@pytest.mark.parametrize(("size", "shown"), [((20, 60), (80, 240)), ((960, 480), (240, 120))])
def test_an_image_keeps_its_shape(size: tuple[int, int], shown: tuple[int, int]) -> None:
    """Nothing stretched, nothing cut, nothing over its neighbour."""
    red = Image.new("RGB", size, (255, 0, 0))
    panels = [Panel(title, "note", [red, red], ["a", "b"], "foot") for title in ("one", "two")]
    sheet = draw_sheet(panels, columns=2, foot="the end")
    is_red = sheet.getchannel("G").point(lambda v: 255 * (v < 5))
    columns = [x for x in range(sheet.width) if is_red.crop((x, 0, x + 1, sheet.height)).getbbox()]
    box = is_red.getbbox()
    assert box is not None and box[3] - box[1] == shown[1]
    assert len(columns) == 4 * shown[0]  # two panels of two, none over another
