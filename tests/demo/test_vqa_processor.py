"""The processor of `scenes-vqa`: the model's own token counts, views, ragged batches, answers."""

from __future__ import annotations

from typing import Any

import torch

import mmaccel
from mmaccel.demo.scenes_vqa.data import make_examples
from mmaccel.demo.scenes_vqa.processor import BOS, EOS, IMAGE, PAD, PINPOINTS, UNKNOWN, WORDS
from mmaccel.demo.scenes_vqa.processor import make_processor as open_processor
from mmaccel.demo.scenes_vqa.views import split_views

EXAMPLES = make_examples(7, range(12), per_kind=3)
PROCESSOR: Any = open_processor()


def tiny_model() -> Any:
    """A random model of one layer that takes the same inputs."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
    )

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=len(WORDS),
        num_attention_heads=2,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=BOS,
        initializer_range=0.5,
        **small,
    )
    vision = CLIPVisionConfig(image_size=40, patch_size=4, num_attention_heads=2, **small)
    return LlavaNextForConditionalGeneration(
        LlavaNextConfig(
            vision_config=vision.to_dict(),
            text_config=text.to_dict(),
            image_token_index=IMAGE,
            vision_feature_layer=-1,
            image_grid_pinpoints=PINPOINTS,
        )
    ).eval()


def ask(images: Any, texts: list[str]) -> Any:
    return PROCESSOR(images=images, text=texts, padding=True, return_tensors="pt")


def test_views_are_those_of_the_processor() -> None:
    inputs = ask(list(EXAMPLES.images), ["<image>"] * 12)
    assert torch.equal(inputs["image_sizes"], torch.full((12, 2), 80))
    assert torch.allclose(inputs["pixel_values"], split_views(EXAMPLES.images), atol=1e-6)


def test_every_word_is_known_and_numbers_are_read_by_digit() -> None:
    tokenizer = PROCESSOR.tokenizer
    for questions in EXAMPLES.questions:
        for question in questions:
            ids = tokenizer(f"{question.text} {question.answer}")["input_ids"]
            assert ids[0] == BOS and UNKNOWN not in ids
            back = tokenizer.decode(ids, skip_special_tokens=True)
            assert back == f"{question.text} {question.answer}".replace("?", " ?")
    ids = tokenizer("72", add_special_tokens=False)["input_ids"]
    assert [WORDS[k] for k in ids] == ["7", "##2"] and tokenizer.decode(ids) == "72"
    assert tokenizer("elephant", add_special_tokens=False)["input_ids"] == [UNKNOWN]


def test_counts_are_the_models_own_in_a_ragged_batch() -> None:
    image, other = EXAMPLES.images[0], EXAMPLES.images[1]
    wide = image[:, :40]  # another shape: three views
    texts = ["what colour is the star?", "<image> how many stars are there?"]
    texts += ["<image> <image> is there a red star?", "<image> what?"]
    inputs = ask([[], [image], [wide, other], [other]], texts)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    assert inputs["pixel_values"].shape == (4, 5, 3, 40, 40)
    assert (ids == IMAGE).sum(1).tolist() == [0, 520, 310 + 520, 520]
    starts = (mask == 0).sum(1)
    assert all(mask[b, s:].all() and ids[b, s] == BOS for b, s in enumerate(starts.tolist()))
    assert starts.tolist()[2] == 0 and starts.tolist()[0] > 800
    model = tiny_model()
    with torch.no_grad():
        features = model.get_image_features(
            pixel_values=inputs["pixel_values"], image_sizes=inputs["image_sizes"]
        ).pooler_output
    assert [len(f) for f in features] == [520, 310, 520, 520]


def test_a_row_of_a_batch_is_answered_as_alone() -> None:
    model = tiny_model()
    images = [[EXAMPLES.images[0]], [EXAMPLES.images[1], EXAMPLES.images[2]], [EXAMPLES.images[3]]]
    texts = ["<image> how many stars?", "<image> <image> which?", "<image> what number is on it?"]
    together = ask(images, texts)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    answers = model.generate(**together, **options)[:, together["input_ids"].shape[1] :]
    for b in range(3):
        alone = ask([images[b]], texts[b : b + 1])
        found = model.generate(**alone, **options)[:, alone["input_ids"].shape[1] :]
        assert torch.equal(found[0], answers[b])
    assert len({tuple(a.tolist()) for a in answers}) > 1


def test_a_saved_model_opens(tmp_path: Any) -> None:
    tiny_model().half().save_pretrained(tmp_path)
    model, processor = mmaccel.load_demo("scenes-vqa", tmp_path)
    assert model.dtype == torch.float32 and not model.training
    inputs = processor(
        images=[EXAMPLES.images[0]], text=["<image> what?"], padding=True, return_tensors="pt"
    )
    assert model.generate(**inputs, max_new_tokens=2, eos_token_id=None).shape[1] == 525
