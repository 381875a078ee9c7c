"""The checker: real pictures pass, every kind of wrong picture fails the verdict it belongs to."""

import pytest
import torch

from mmaccel.demo.scenes_check import check_pictures, score_pictures
from mmaccel.demo.scenes_data import make_scenes
from mmaccel.demo.scenes_segment import core_size, largest_piece
from mmaccel.errors import OptionError, ShapeError

_, CAPTIONS, DRAWN = make_scenes(11, range(80))
PICTURES = DRAWN.float() / 255


def test_real_pictures_are_right() -> None:
    scores = score_pictures(PICTURES, CAPTIONS)
    assert scores["whole"] >= 0.97
    assert scores["background"] >= 0.99


SWAPS = {
    "background": [
        (" grass", " snow"),
        (" sand", " water"),
        (" snow", " grass"),
        (" water", " sand"),
    ],
    "colours": [("red", "blue"), ("green", "purple"), ("yellow", "red"), ("white", "green")],
    "shapes": [
        ("circle", "square"),
        ("star", "circle"),
        ("ring", "triangle"),
        ("triangle", "ring"),
    ],
    "sizes": [("small", "large"), ("large", "small"), ("little", "big")],
    "relations": [
        ("above", "below"),
        ("left of", "right of"),
        ("inside", "above"),
        ("under", "over"),
    ],
}


@pytest.mark.parametrize("verdict", list(SWAPS))
def test_a_wrong_word_fails_its_own_verdict(verdict: str) -> None:
    tried = caught = 0
    for old, new in SWAPS[verdict]:
        for k, caption in enumerate(CAPTIONS):
            wrong = caption.replace(old, new)
            if wrong == caption or (verdict == "colours" and new in caption):
                continue
            if tried >= 30:
                break
            tried += 1
            judged = check_pictures(PICTURES[k : k + 1], [wrong])[0]
            caught += not getattr(judged, verdict) and not judged.whole
    assert tried >= 15
    assert caught >= 0.97 * tried


def test_a_colour_too_many_is_wrong() -> None:
    scenes, captions, drawn = make_scenes(12, range(60))
    for k, scene in enumerate(scenes):
        if len(scene.objects) == 2 and scene.relations[0] != "inside":
            wanted = scene.objects[0]
            caption = f"a {wanted.colour} {wanted.shape}"
            assert not check_pictures(drawn[k : k + 1].float() / 255, [caption])[0].colours
            return
    pytest.fail("no picture of two objects among sixty")


def test_pieces_and_cores_by_hand() -> None:
    mask = (
        torch.tensor(
            [
                [1, 1, 0, 0, 0],
                [1, 1, 0, 1, 1],
                [0, 0, 0, 1, 1],
                [0, 0, 0, 1, 1],
            ]
        )
        .bool()
        .numpy()
    )
    piece = largest_piece(mask)
    assert piece.sum() == 6 and piece[1:, 3:].all()
    assert core_size(mask) == 0
    full = torch.ones(4, 5).bool().numpy()
    assert core_size(full) == 2 * 3
    assert largest_piece(full & False).sum() == 0


def test_bad_input_is_named() -> None:
    with pytest.raises(ShapeError, match="2 captions"):
        check_pictures(PICTURES[:1], CAPTIONS[:2])
    with pytest.raises(OptionError, match="caption"):
        check_pictures(PICTURES[:1], ["a dog"])
