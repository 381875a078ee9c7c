"""A next-scale model through the pipeline and the command: what is chosen, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmaccel import MaskedParallel, TextToImage
from mmaccel.cli import main
from mmaccel.errors import MMAccelError, OptionError
from tests.fixtures.next_scale import build_folder
from tests.fixtures.tiny_model import CAPTIONS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("scales"))


def test_a_call_draws_scale_by_scale(folder: Path) -> None:
    pipe = TextToImage.from_pretrained(folder, device="cpu")
    made = pipe(CAPTIONS, seed=[1, 2, 3])
    assert made.stats.policy == "NextScale()" and made.passes.tolist() == [3, 3, 3]
    assert made.images[0].size == pipe.size == (12, 12) and made.tokens.shape == (3, 14)
    again = pipe(CAPTIONS[::-1], seed=[3, 2, 1], batch_size=1, policy="lossless-unmask")
    assert again.tokens.flip(0).equal(made.tokens)
    few = pipe(CAPTIONS, seed=[1, 2, 3], policy=MaskedParallel(), num_inference_steps=2)
    assert few.stats.passes == 5  # two of each scale but the first
    for wrong, message in (
        ({"num_inference_steps": 4}, "steps: expected none under NextScale, .* MaskedParallel"),
        ({"height": 24}, "size: expected 12x12, the only one"),
        ({"policy": "jacobi"}, "policy: .* it is for a window"),
        ({"attention": "quest"}, "attention: expected .* leave attention out"),
        ({"prompt": "a red dog"}, "prompt: expected words the model knows, received 'dog'"),
    ):
        with pytest.raises(MMAccelError, match=message):
            pipe(**{"prompt": CAPTIONS[0]} | wrong)
    for option in ({"fused": True}, {"compile": True}):
        with pytest.raises(MMAccelError, match="expected .* leave"):
            TextToImage.from_pretrained(folder, **option)(CAPTIONS[0])


def test_the_command_compares_it_with_one_slot_a_pass(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = ["--model", str(folder), "--out", str(tmp_path), "--seed", "0"]
    assert main(["generate", CAPTIONS[0], "--compare", *fixed]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "token by token 14.0" in said and "next-scale 3.0" in said
    assert "token for token; scale by scale is the model's plain loop" in said


def edit(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changes))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit("words.json", words=["a"]), "expected 4 conditions, as many as words.json has, rec"),
        (edit("config.json", sides=[1, 3]), "expected a tokenizer of scales .1, 3. with 11 codes"),
        (edit("config.json", n_codes=12), "with 12 codes of width 4, as config.json says, rec"),
        (edit("config.json", depth=3), "model: expected .blocks.2.* asks, received none"),
        (edit("config.json", condition="class"), "expected a network of texts, .* leave the fam"),
        (edit("config.json", n_heads=3), "width: expected a multiple of 12, .* received 32"),
        (edit("config.json", **{"class": "VAR"}), "class 'NextScaleTransformer' in .*, rec"),
        (edit("tokenizer.json", sides=[1, 2, 4]), "sides: expected the last to be 3, .* rec"),
        (edit("tokenizer.json", **{"class": "VQ"}), "class 'MultiScaleTokenizer' in .*, received"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_of_other_models_are_one_line(
    change: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    change(build_folder(tmp_path))
    with pytest.raises(MMAccelError, match=message) as refused:
        TextToImage.from_pretrained(tmp_path, family="scale-words")
    assert "\n" not in str(refused.value)


def test_another_family_is_told_apart(folder: Path) -> None:
    for family in ("words", "masked-words"):
        with pytest.raises(OptionError, match="model: expected"):
            TextToImage.from_pretrained(folder, family=family)
    with pytest.raises(OptionError, match="expected class 'MultiScaleTokenizer'"):
        TextToImage.from_pretrained("scenes", family="scale-words")
