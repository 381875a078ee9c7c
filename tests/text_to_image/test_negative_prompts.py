"""Negative prompts: they replace the unconditional prompt of their own image, and of no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel import Jacobi, Request, TextToImage
from mmaccel.catalog import make_policy
from mmaccel.pipelines.text_to_image.model import spread_negatives
from tests.fixtures.checkpoints import SIZES, captions
from tests.fixtures.tiny_model import CAPTIONS, N_CODES, N_TOKENS, WORDS, masked_beside_plain

SCALE = 2.0
NEGATIVES = ["blue square on grass", None, "red"]  # as long as other rows, longer, shorter
EMU3 = ["blue cat on grass", None, "snow"]
BOS, BOI = N_CODES, N_CODES + 1
Built = Callable[[str], Path]


def ids_of(caption: str) -> list[int]:
    """Ids of a prompt by hand; the empty text is the unconditional prompt."""
    return [BOS, *(N_CODES + 3 + WORDS.index(w) for w in caption.split()), BOI]


@pytest.fixture(scope="module")
def pipe(tiny_folder: Path) -> TextToImage:
    return TextToImage.from_pretrained(tiny_folder, dtype=torch.float64)


@pytest.fixture(scope="module")
def canvas(tmp_path_factory: pytest.TempPathFactory) -> TextToImage:
    masked, _ = masked_beside_plain(tmp_path_factory.mktemp("cache"))
    return TextToImage.from_pretrained(masked, dtype=torch.float64)


@pytest.fixture(scope="module")
def emu3(built: Built) -> TextToImage:
    size = SIZES["emu3"]
    return TextToImage.from_pretrained(built("emu3"), size=size, dtype=torch.float64)


def guide(logits: list[Any]) -> int:
    """The likeliest token between a conditional and an unconditional row."""
    conditional, unconditional = logits
    return int((unconditional + SCALE * (conditional - unconditional)).argmax())


@pytest.mark.parametrize("negative", ["blue square on grass", None])
def test_tokens_are_those_of_a_plain_loop_over_the_raw_model(
    pipe: TextToImage, negative: str | None
) -> None:
    """Full passes without a cache, row by row; the negative prompt is the unconditional one."""
    model: Any = pipe.model.model  # type: ignore[union-attr]
    tokens: list[int] = []
    for _ in range(N_TOKENS):
        rows = (ids_of(CAPTIONS[0]), ids_of(negative or ""))
        with torch.no_grad():
            seen = [model(input_ids=torch.tensor([row + tokens])).logits[0, -1] for row in rows]
        tokens.append(guide([logits[:N_CODES] for logits in seen]))
    for policy in (mmaccel.Autoregressive(), Jacobi(5), make_policy("sjd", window=4)):
        made = pipe(CAPTIONS[0], policy=policy, negative_prompt=negative, temperature=0.0)
        assert made.tokens[0].tolist() == tokens
    usual = pipe(CAPTIONS[0], temperature=0.0).tokens[0].tolist()
    assert (usual == tokens) is (negative is None)


KINDS = [("pipe", Jacobi(5)), ("emu3", Jacobi(7)), ("canvas", None)]


@pytest.mark.parametrize(("name", "policy"), KINDS)
def test_a_batch_is_its_images_one_by_one(
    name: str, policy: Any, request: pytest.FixtureRequest
) -> None:
    """Rows with and without negative prompts, in fixed batches and with continuous batching."""
    own: TextToImage = request.getfixturevalue(name)
    texts, negatives = (captions("emu3"), EMU3) if name == "emu3" else (CAPTIONS, NEGATIVES)
    seeds = [3, 4, 5]
    alone = [
        own(t, negative_prompt=n, seed=[s], policy=policy)
        for t, n, s in zip(texts, negatives, seeds)
    ]
    plain = [own(t, seed=[s], policy=policy) for t, s in zip(texts, seeds)]
    for made, other, negative in zip(alone, plain, negatives):
        assert made.tokens.equal(other.tokens) is (negative is None)
    made = own(texts, negative_prompt=negatives, seed=seeds, policy=policy, batch_size=2)
    assert made.tokens.tolist() == [one.tokens[0].tolist() for one in alone]
    requests = [Request(t, s, k, n) for k, (t, s, n) in enumerate(zip(texts, seeds, negatives))]
    served: dict[int, Any] = {}
    own.serve(
        requests[::-1], own.image_model.params, policy=policy, rows=2,
        deliver=lambda one: served.update({one.request.tag: one}),
    )  # fmt: skip
    for k, one in enumerate(alone):
        assert served[k].tokens.equal(one.tokens[0])


def test_one_text_is_for_all_and_images_of_a_prompt_share_theirs(pipe: TextToImage) -> None:
    options: Any = {"seed": [1, 2, 3, 4], "num_images_per_prompt": 2}
    both = pipe(CAPTIONS[:2], negative_prompt="red", **options)
    listed = pipe(CAPTIONS[:2], negative_prompt=["red", "red"], **options)
    assert both.tokens.equal(listed.tokens)
    one = pipe(CAPTIONS[:2], negative_prompt=[None, "red"], **options)
    none = pipe(CAPTIONS[:2], **options)
    assert one.tokens[:2].equal(none.tokens[:2]) and one.tokens[2:].equal(both.tokens[2:])
    assert not both.tokens[2:].equal(none.tokens[2:])
    for blank in ("", " \n", None, ["", None]):
        assert pipe(CAPTIONS[:2], negative_prompt=blank, **options).tokens.equal(none.tokens)


def test_texts_are_spread_over_prompts() -> None:
    assert spread_negatives(None, 2) == [None, None] and spread_negatives("a", 2) == ["a", "a"]
    assert spread_negatives(["a", ""], 2) == ["a", None]
