"""The shipped weights are as right as their cards say; their features see damage."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.catalog import DEMO_WEIGHTS
from mmaccel.demo.features import STEP, WINDOW, cut_windows, draw_reference, hear, load_features
from mmaccel.demo.recall.documents import list_questions as ask_documents
from mmaccel.demo.recall.words import to_text
from mmaccel.demo.scenes_vqa.data import list_questions
from mmaccel.evaluation.quality.distances import frechet_distance
from scripts.training.loop import WEIGHTS
from scripts.training.stdlib import encode, held_out_modules, make_prompts, open_stdlib


def read_card(name: str) -> dict[str, Any]:
    card: dict[str, Any] = json.loads((DEMO_WEIGHTS / name / "card.json").read_text())
    return card


@pytest.mark.slow
def test_scenes_vqa_answers_as_its_card_says() -> None:
    card = read_card("scenes-vqa")
    model, processor = mmaccel.load_demo("scenes-vqa")
    assert card["parameters"] == sum(p.numel() for p in model.parameters())
    images, questions = zip(*list_questions(8, 29), strict=True)  # a seed of no other collection
    texts = [f"<image> {question.text}" for question in questions]
    inputs = processor(images=[*images], text=texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        made = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    given = processor.batch_decode(
        made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    right = Counter(q.kind for q, text in zip(questions, given, strict=True) if q.answer == text)
    assert right.total() >= 0.9 * len(questions)
    assert all(
        right[kind] >= 6
        for kind, row in card["right"].items()
        if row["right"] >= 0.98 and kind != "all"
    )


@pytest.mark.slow
def test_recall_answers_as_its_card_says() -> None:
    card = read_card("recall")
    model, tokenizer = mmaccel.load_demo("recall")
    assert card["parameters"] == sum(p.numel() for p in model.parameters())
    right = 0
    for document, question in ask_documents(3, 1024, 39):
        text = to_text((*document.tokens[1:], *question.prompt))
        inputs = tokenizer(text, return_tensors="pt")
        made = model.generate(**inputs, max_new_tokens=len(question.answer), do_sample=False)
        right += made[0, inputs["input_ids"].shape[1] :].tolist() == list(question.answer)
    assert right >= 11  # of 12; the card has 99.5 %


@pytest.mark.slow
def test_stdlib_takes_the_bits_that_its_card_says_and_drafts_save_passes() -> None:
    card = json.loads((WEIGHTS / "stdlib" / "card.json").read_text())
    model, tokenizer = open_stdlib()
    assert card["parameters"] == sum(p.numel() for p in model.parameters())
    modules = sorted(held_out_modules(shortest=4000), key=lambda module: len(module.text))
    for module in modules[:2]:
        ids = torch.tensor([encode(tokenizer, module)])
        with torch.no_grad():
            nats = float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
        bits = nats / math.log(2) / len(module.text.encode())
        # another Python has other text in the same module
        assert bits == pytest.approx(card["by_module"][module.name], rel=0.15), module.name
    text = "class A:\n    def f(self, x='ä'):\n\t\treturn x  # 日本\n"
    assert (
        tokenizer.decode(tokenizer(text)["input_ids"][1:], clean_up_tokenization_spaces=False)
        == text
    )
    drafts: dict[str, Any] = {"plain": None, "ngram": "ngram"}
    drafts["head"] = mmaccel.Eagle(f"{model.name_or_path}/head")
    drafts["coarse"] = mmaccel.Coarse(f"{model.name_or_path}/coarse")
    passes: Counter[str] = Counter()
    prompts = make_prompts(tokenizer, 2, 128)
    for prompt in prompts:
        made = []
        for name, source in drafts.items():
            policy = mmaccel.Jacobi(6, source) if source else mmaccel.Autoregressive()
            with mmaccel.attach(model, policy, strict=True) as run:
                options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None}
                made.append(model.generate(torch.tensor([prompt]), **options))
                passes[name] += run.stats.passes
        assert all(torch.equal(one, made[0]) for one in made)
    assert passes["head"] < passes["plain"] / 2.5 and passes["ngram"] < passes["plain"] / 1.5
    assert passes["coarse"] < passes["plain"]


def add_noise(items: Tensor, strength: float) -> Tensor:
    noise = torch.randn(items.shape, generator=torch.Generator().manual_seed(0))
    return (items.float() / 255 + strength * noise).clamp(0, 1)


def freeze(clips: Tensor, share: float) -> Tensor:
    n = round(share * len(clips))
    return torch.cat([clips[:n, :1].expand_as(clips[:n]), clips[n:]])


DAMAGES: dict[str, tuple[str, Callable[[Tensor, float], Tensor], tuple[float, ...]]] = {
    "noise": ("images", add_noise, (0.1, 0.2)),
    "noise in clips": ("clips", add_noise, (0.05, 0.1, 0.2)),
    "frozen clips": ("clips", freeze, (0.5, 0.75, 1.0)),
}


@pytest.fixture(scope="module")
def drawn() -> dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """Items that no training saw, and their features."""
    items = {"images": ("scenes", 300), "clips": ("moving-scenes", 240)}
    return {
        kind: (draw_reference(name, 0, count), load_features(name).extract)
        for kind, (name, count) in items.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_distances_rise_with_damage(drawn: dict[str, Any], damage: str) -> None:
    kind, spoil, amounts = DAMAGES[damage]
    items, extract = drawn[kind]
    first, others = items[: len(items) // 2], items[len(items) // 2 :]
    reference = extract(first).numpy()
    assert frechet_distance(reference, reference) < 1e-6
    found = [frechet_distance(reference, extract(others).numpy())]
    found += [frechet_distance(reference, extract(spoil(others, a)).numpy()) for a in amounts]
    assert found == sorted(found) and found[-1] > 1.3 * found[0]
    alone = extract(items[7:8].float() / 255)
    assert torch.allclose(extract(items[:10])[7:8], alone, atol=1e-4)


def test_features_of_speech_are_of_windows_and_see_noise() -> None:
    sound = torch.arange(WINDOW + 2 * STEP + 5).float()
    windows = cut_windows(sound)
    assert windows.shape == (3, WINDOW) and windows[:, 0].tolist() == [0, STEP, 2 * STEP]
    short = cut_windows(sound[:7])
    assert short.shape == (1, WINDOW) and short[0, :8].tolist() == [*range(7), 0]
    (spoken,) = mmaccel.TextToSpeech.from_pretrained("voices")("the red bird sings", seed=[0])
    heard = hear(spoken.waveform)
    noise = torch.randn(spoken.waveform.shape, generator=torch.Generator().manual_seed(0))
    far = [
        float((hear(spoken.waveform + strength * noise) - heard).abs().mean())
        for strength in (0.002, 0.02, 0.1)
    ]
    assert far == sorted(far) and far[-1] > 1.5 * far[0] > 0
