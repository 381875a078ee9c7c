"""HART: logits as published, the shares of guidance, other layouts refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import TextToImage
from mmaccel.errors import OptionError, UnsupportedModelError
from tests.fixtures.hart import FEATURES, LONGEST, build_hart, find_logits, save_hart
from tests.fixtures.var import CODE, LENGTHS, SIDES

PROMPTS = ["a red fox in the snow", "blue cat"]


def open_hart(folder: Path, side: str = "right", **changes: Any) -> TextToImage:
    return TextToImage.from_pretrained(save_hart(folder, side, **changes), dtype="fp32")


def read(model: Any, side: str) -> tuple[Tensor, Tensor]:
    """Features `[4, T, F]` and positions of both prompts and of two rows without one."""
    system = torch.tensor([model.window.reader.system])
    features, positions = torch.zeros(4, LONGEST, FEATURES), torch.zeros(4, LONGEST)
    for row, text in enumerate(PROMPTS):
        ids = torch.tensor([model.encode(text)])
        gap = torch.zeros(1, LONGEST - ids.shape[1], dtype=torch.int64)
        padded = torch.cat([gap, ids] if side == "left" else [ids, gap], 1)
        asked = torch.cat([system, padded], 1)
        mask = torch.cat([torch.ones_like(system), (padded > 0).long()], 1)
        hidden = model.encoder(input_ids=asked, attention_mask=mask).last_hidden_state
        features[row] = hidden[0, -LONGEST:]
        positions[row] = (padded[0] > 0).cumsum(0) - 1
    return features, positions


@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_logits_are_as_published(tmp_path: Path, side: str) -> None:
    model: Any = open_hart(tmp_path, side).prompted_model
    window = model.window
    prompt = model.prompt([model.encode(text) for text in PROMPTS], True)
    window.reserve(4, 1)
    window.begin(prompt)
    told, is_real = window.tell(window._ids, window._is_real)
    sums = torch.randn(4, sum(LENGTHS) - 1, CODE, generator=torch.Generator().manual_seed(2))
    logits = window.model(told, is_real, sums)
    expected = find_logits(build_hart(), *read(model, side), sums)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_a_negative_prompt_is_read(tmp_path: Path) -> None:
    pipe = open_hart(tmp_path)
    made = pipe(PROMPTS, seed=[1, 2])
    assert made.stats.passes == len(SIDES) and len(made.tokens.unique()) > 3
    assert not torch.equal(made.tokens, pipe(PROMPTS, seed=[1, 2], negative_prompt="snow").tokens)


def test_the_last_scale_has_no_convolution_and_the_guidance_of_the_one_before(
    tmp_path: Path,
) -> None:
    model: Any = open_hart(tmp_path).prompted_model
    shares = model.layout.guidance_share(torch.tensor([[0, 1, 5, 14, 29]]))
    torch.testing.assert_close(shares, torch.tensor([[0, 1 / 3, 2 / 3, 2 / 3, 2 / 3]]))
    quantizer = model.tokenizer.quantize
    codes = torch.arange(LENGTHS[-1])[None] % 12
    plain = quantizer.vectors(codes).mT.unflatten(2, (SIDES[-1], SIDES[-1]))
    assert torch.equal(quantizer.spread(codes, len(SIDES) - 1), plain)


def test_other_layouts_are_refused(tmp_path: Path) -> None:
    pipe = open_hart(tmp_path)
    with pytest.raises(OptionError, match="expected at most 9 tokens, received 10"):
        pipe(" ".join(["snow"] * 10))
    with pytest.raises(UnsupportedModelError, match="expected disable_aln True"):
        open_hart(tmp_path, disable_aln=False)
    (save_hart(tmp_path) / "qwen-tiny").rename(tmp_path / "other")
    with pytest.raises(OptionError, match="expected a text encoder in"):
        TextToImage.from_pretrained(tmp_path)
