"""What `--compare` says about two sides is true."""

from __future__ import annotations

import pytest
import torch

from mmaccel.commands.comparison import identical, promise, verdict
from mmaccel.pipelines.pictures import Pictures
from mmaccel.results import Stats


def side(tokens: list[list[int]]) -> Pictures:
    return Pictures([], torch.tensor(tokens), Stats(), [])


def test_a_picture_is_identical_only_if_every_token_is() -> None:
    plain = side([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert identical(plain, plain) == 3
    assert identical(plain, side([[1, 2, 3], [4, 0, 6], [9, 8, 7]])) == 1
    assert identical(plain, side([[1, 2, 0], [4, 5, 0], [0, 8, 9]])) == 0


@pytest.mark.parametrize(
    ("same", "count", "exactness", "said"),
    [
        (8, 8, "bitwise", "The same images, token for token"),
        (1, 1, "relaxed", "The same image, token for token"),
        (7, 8, "bitwise", "7 of 8 images identical: bitwise was promised: please report this"),
        (0, 8, "distribution", "0 of 8 images identical: other draws from the same law, as pro"),
        (2, 8, "relaxed", "2 of 8 images identical: a relaxed policy: another law"),
    ],
)
def test_verdict(same: int, count: int, exactness: str, said: str) -> None:
    assert verdict(same, count, exactness).startswith(said)


def test_a_relaxed_run_says_what_it_spent() -> None:
    assert promise(Stats(exactness="bitwise")) == "bitwise: same seed, same tokens"
    spent = Stats(exactness="relaxed", tokens=200, total_variation=25.0)
    assert promise(spent) == "relaxed: total variation 0.125 spent a token"
