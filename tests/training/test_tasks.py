"""What each model learns from: labels, packed questions, positions, frames, pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmaccel.demo.moving_scenes.data import make_clips
from mmaccel.demo.scenes_vqa.data import make_examples
from mmaccel.demo.scenes_vqa.processor import EOS, make_processor
from mmaccel.tokenizers_vq.autoencoder import ImageTokenizer, ImageTokenizerConfig, save_tokenizer
from mmaccel.tokenizers_vq.speech_codec import SpeechCodec, SpeechCodecConfig
from scripts.training import (
    grammar,
    recall,
    scenes,
    stdlib,
    voices,
    voices_data,
    voices_masked,
    vqa,
    vqa_tower,
)
from scripts.training.loop import IGNORE
from scripts.training.vqa_tower import split_views
from tests.fixtures.voices import TINY_CODEC
from tests.training.test_models import SMALL, TOKENIZER, write_pool

pytestmark = pytest.mark.slow

EXAMPLES = make_examples(7, range(4), per_kind=2)


def digest(*parts: torch.Tensor) -> str:
    """Of the numbers and shapes of tensors of integers."""
    made = [(list(part.shape), part.long().flatten().tolist()) for part in parts]
    return hashlib.sha256(repr(made).encode()).hexdigest()[:16]


BATCHES: dict[str, tuple[Callable[[], tuple[torch.Tensor, ...]], str]] = {
    "tower": (lambda: (vqa_tower.Tower(checks=1).batch(1, 3)[1],), "7febb52ebdc7471d"),
    "questions": (lambda: (vqa.Answers(False, checks=1).batch(3, 2)[1],), "fc73b3219cb183a6"),
    "kept": (lambda: (vqa.choose_tokens(EXAMPLES.maps, seed=3),), "ce4b5ad86c642f68"),
    "recall": (lambda: recall.Recall("short", checks=1).batch(3, 512), "a466f202110b610d"),
    "long": (lambda: recall.Recall("long", checks=1).batch(3, 2048), "7d22dd4d558f11c1"),
    "grammar": (lambda: grammar.Grammar(checks=100).batch(3, 8), "d9510d2f6a79ed3e"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_step_learns_from_what_the_shipped_weights_learnt_from(name: str) -> None:
    make, wanted = BATCHES[name]
    assert digest(*make()) == wanted


def test_packed_questions_are_answered_as_separate_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (vqa, vqa_tower):
        monkeypatch.setattr(module, "SIZES", SMALL)
    torch.manual_seed(0)
    model = vqa.build_model().eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    packed = vqa.encode_questions(EXAMPLES.questions)
    views = split_views(EXAMPLES.images)
    with torch.no_grad():
        logits, labels = vqa.answer_logits(model, views, packed)
        everything = torch.arange(vqa.N_VISUAL).expand(4, -1)
        assert torch.equal(vqa.answer_logits(model, views, packed, everything)[0], logits)
    processor: Any = make_processor()
    found, wanted = iter(logits), iter(labels.tolist())
    for image, questions in zip(EXAMPLES.images, EXAMPLES.questions, strict=True):
        for k, question in enumerate(questions):
            n_answer = len(processor.tokenizer(question.answer)["input_ids"]) - 1
            own = [next(found) for _ in range(n_answer + 1)]
            said = [next(wanted) for _ in own]
            if k > 5:
                continue
            text = f"<image> {question.text} {question.answer}"
            inputs = processor(images=[image], text=[text], return_tensors="pt")
            with torch.no_grad():
                alone = model(**inputs).logits[0, -n_answer - 1 :]
            assert said == [*inputs["input_ids"][0, -n_answer:].tolist(), EOS]
            assert torch.allclose(torch.stack(own), alone, atol=1e-4)
    assert next(found, None) is None


def test_pieces_are_of_modules_that_are_not_held_out(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "test/d.py", "a/data.txt", "config-3.11/f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n", encoding="utf-8")
    (tmp_path / "long.py").write_text("#" * 400_001, encoding="utf-8")
    assert [module.name for module in stdlib.read_modules(tmp_path)] == ["a/c.py", "b.py"]
    known = [stdlib.Module(name, "").is_held_out for name in ("_sitebuiltins.py", "heapq.py")]
    assert known == [True, False]  # the same ones on every machine


def test_captions_are_dropped_and_clips_are_their_own_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scenes, "_CHECKED", 2)
    monkeypatch.setattr(scenes, "_CHECK_BATCH", 2)
    config = {**TOKENIZER, "patch": 8}
    save_tokenizer(ImageTokenizer(ImageTokenizerConfig(**config)), tmp_path)
    task = scenes.Generator(scenes.CLIPS, tmp_path)
    ids, labels = task.batch(3, 2)
    assert torch.equal(ids, task.batch(3, 2)[0]) and not torch.equal(ids, task.batch(4, 2)[0])
    frames = make_clips(scenes.CLIPS.seeds[0], range(6, 8))[2].flatten(0, 1).float() / 255
    assert labels[labels != IGNORE].tolist() == task.tokenizer.encode(frames).flatten().tolist()
    assert (ids[:, 1] > task.words.pad).all()
    monkeypatch.setattr(scenes, "_DROPPED", 1.0)
    assert task.batch(0, 2)[0][:, :2].tolist() == [[task.words.bos, task.words.boi]] * 2


@pytest.fixture
def text(tmp_path: Path) -> voices.SpokenText:
    write_pool(tmp_path, "train", 0)
    pool = voices_data.open_pool(tmp_path, "train", 0, 0)
    torch.manual_seed(0)
    return voices.SpokenText(
        pool, SpeechCodec(SpeechCodecConfig(**TINY_CODEC)), tmp_path / "codes.pt"
    )


def test_utterances_are_prompts_codes_and_ends(text: voices.SpokenText) -> None:
    rows = text.rows(3, 4)
    ids, labels = voices.pack_flat(text, rows)
    for own, said, row in zip(ids, labels, rows.tolist(), strict=True):
        codes = said[said != IGNORE].tolist()
        assert codes == [*text.codes[row][:, :2].flatten().tolist(), text.end]
        assert own[: len(text.prompts[row])].tolist() == text.prompts[row]
    epoch = [row for k in range(6) for row in text.rows(k, 4).tolist()]
    assert sorted(epoch) == list(range(24))
    assert [row for k in range(6, 12) for row in text.rows(k, 4).tolist()] != epoch


def test_losses_of_the_books_are_the_classs_own(text: voices.SpokenText) -> None:
    """The temporal and the depth loss of `CsmForConditionalGeneration` for the same frames."""
    task = voices.Depth(text, text, SpeechCodec(SpeechCodecConfig(**TINY_CODEC)), checks=20)
    model = task.build(None)
    ids, labels = task.batch(0, 3)
    assert bool((labels[ids[..., 0] == -1][..., 0] != IGNORE).all())
    losses = voices.book_losses(model, ids, labels)
    words = model.embed_text_tokens(ids[..., 0].clamp(min=0))
    sound = model.backbone_model.embed_tokens(ids[..., 1:])
    inputs = torch.where(ids[..., :1] == -1, sound, words)
    own = model(inputs_embeds=inputs, labels=labels.clone())
    assert torch.allclose(losses[0], own.backbone_loss, atol=1e-5)
    assert torch.allclose(losses[1:].mean(), own.depth_decoder_loss, atol=1e-5)
    begins = set()
    for step in range(4):
        for row in task.batch(step, 4)[0]:
            frame = row[row[:, 0] == -1][0, 1:].view(voices.STACK, -1)
            begins.add(int((frame == task.silence).all(1).int().cumprod(0).sum()))
    assert begins == set(range(voices.STACK))  # an utterance comes with other stacks


def test_phonemes_and_sound_of_espeak(tmp_path: Path) -> None:
    assert voices_data.write_phonemes(["h", "@", "l", "'", "oU"]) == "h|@|l|'oU"
    time = np.arange(2205) / 22_050
    low, high = np.sin(2 * np.pi * 440 * time), np.sin(2 * np.pi * 9_500 * time)
    made = voices_data.resample(low + high)
    wanted = np.sin(2 * np.pi * 440 * np.arange(1600) / 16_000)
    assert len(made) == 1600 and np.abs(made - wanted)[50:-50].max() < 0.02
    if find_spec("espeakng_loader") is not None:
        pool = voices_data.open_pool(tmp_path, "train", 5, 4)
        assert pool.lexicon["seven"][0] == "s" and len(pool.lexicon) == 497
        assert 4_000 < len(pool.utterance(0)) < 80_000 and pool.utterance(0).abs().max() > 0.2


def test_the_bound_of_masked_speech_is_the_mean_over_what_each_row_hides(
    text: voices.SpokenText,
) -> None:
    """One row for each number of hidden codes, each row alone by hand; and later books go first."""
    codec = SpeechCodec(SpeechCodecConfig(**TINY_CODEC))
    task = voices_masked.MaskedSpeech(text, text, codec.flat_size, codec.book_size, checks=20)
    torch.manual_seed(0)
    model = task.build(None).double().eval().requires_grad_(False)
    row = int(text.lengths.argmin())
    n = 3 * len(text.codes[row])
    ids, labels = task.pack(text, np.full(n, row))
    found = task.bound(model, ids, labels, np.random.default_rng(2), 0.0)
    rng = np.random.default_rng(2)
    counts = voices_masked.draw_counts(rng, n, n)
    assert sorted(counts) == [*range(1, n + 1)]
    hidden = voices_masked.hide_books(labels != IGNORE, counts, rng, np.zeros(n))
    losses = []
    for k in range(n):
        frames = ids[k : k + 1, -n // 3 :, 1:].masked_fill(hidden[k], task.mask)
        there = torch.ones(1, ids.shape[1], dtype=torch.bool)
        states = model.states(ids[k : k + 1, : -n // 3, 0], frames, there)
        own = model.logits(states).log_softmax(-1)[0].gather(-1, labels[k][..., None])
        losses.append(-own[..., 0][hidden[k]].mean())
    assert float(found) == pytest.approx(float(torch.stack(losses).mean()), rel=1e-6)
    half = np.full(n, n // 2)
    last = voices_masked.hide_books(labels != IGNORE, half, rng, np.full(n, 99.0))
    assert last[0].sum(0).tolist() == [0, n // 2 - n // 3, n // 3]
