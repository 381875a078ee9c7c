"""What is printed of pipelines and of what they return: one screen, with what matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmaccel import ImageToText, Jacobi, TextToImage
from mmaccel.demo.scenes_vqa.processor import make_processor
from mmaccel.pipelines.text_to_image.outputs import RequestOutput
from mmaccel.reduction.visual_tokens.dart import DART
from tests.fixtures.tiny_model import CAPTIONS
from tests.fixtures.tiny_vqa import QUESTION, build_vqa, scene


def test_images(tiny_folder: Path) -> None:
    pipe = TextToImage.from_pretrained(tiny_folder, device="cpu", dtype="bf16", cuda_graphs=False)
    expected = f"TextToImage(Word, 16x16 of {tiny_folder}, bfloat16 on cpu, cuda_graphs=False)"
    assert repr(pipe) == expected
    out = pipe(CAPTIONS[:2], policy=Jacobi(4))
    assert repr(out).startswith(
        "ImageOutput(images=[<image 16x16>, <image 16x16>], tokens=<[2, 16]"
    )
    assert out.stats.summary in repr(out) and len(repr(out)) < 500
    many = pipe(CAPTIONS[0], policy=Jacobi(4), num_images_per_prompt=5)
    assert "images=<5 of Image>" in repr(many)
    made: list[RequestOutput] = []
    from mmaccel.pipelines.text_to_image.outputs import Request

    pipe.serve([Request(CAPTIONS[0], 3)], pipe.image_model.params, deliver=made.append)
    assert "seed=3" in repr(made[0]) and "<[16] int64>" in repr(made[0])


def test_answers() -> None:
    pipe = ImageToText(build_vqa(), make_processor(), policy=Jacobi(4))
    assert repr(pipe).startswith("ImageToText(LlavaNextForConditionalGeneration, float32 on cpu")
    assert "Jacobi(window=4" in repr(pipe)
    out: Any = pipe(scene(), QUESTION, max_new_tokens=4)
    assert out.answers[0].text in repr(out) and "int64>" in repr(out) and len(repr(out)) < 900
    assert torch.is_tensor(out.answers[0].tokens)
    with_dart = ImageToText(pipe.model, pipe.processor, visual_tokens=DART(keep=0.5))
    assert "DART(" in repr(with_dart)
