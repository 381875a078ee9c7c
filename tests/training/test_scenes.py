"""Training's small parts: batches, loss mask, step size, resuming, the plain sampler."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mmaccel import CausalLMWindow, Jacobi, TextToImage
from mmaccel.demo.scenes.data import CaptionWords
from mmaccel.pipelines.models.scenes import WordImages
from scripts.training import scenes
from scripts.training.data import IGNORE, TokenPool, as_float, pack
from scripts.training.export import scenes_commands
from scripts.training.generator import GeneratorTraining, save_half, train_generator
from scripts.training.scenes_tokenizer import object_weight, psnr


def test_pack_by_hand() -> None:
    words = CaptionWords(15)
    ids, labels = pack([[15, 20, 16], [15, 16]], np.array([[1, 2], [3, 4]]), words.pad)
    assert ids.tolist() == [[15, 20, 16, 1, 2], [15, 16, 3, 4, words.pad]]
    no = IGNORE
    assert labels.tolist() == [[no, no, no, 1, 2], [no, no, 3, 4, no]]


def test_an_epoch_shows_every_image_once_and_batches_can_be_asked_for_again(work: Path) -> None:
    pool = TokenPool(work, "train", CaptionWords(15), drop=0.0)
    shown = []
    for step in range(3):
        _, labels = pool.batch(step, 4)
        shown += [tuple(row[row != IGNORE].tolist()) for row in labels]
    assert len(set(shown)) == 12
    again = TokenPool(work, "train", CaptionWords(15), drop=0.0).batch(2, 4)
    assert torch.equal(again[0], pool.batch(2, 4)[0])


def test_emphasis_repeats_left_and_right_and_nothing_else(work: Path) -> None:
    left, right = "a red circle left of a blue ring", "a red ring right of a blue star"
    (work / "train.captions.json").write_text(json.dumps([left, *["a red circle"] * 10, right]))
    pool = TokenPool(work, "train", CaptionWords(15), drop=0.0, emphasis=4)
    rows = {tuple(row.tolist()): k for k, row in enumerate(pool.tokens)}
    counts = [0] * 12
    for step in range(6):  # 10 + 2 * 4 = 18 draws an epoch
        for row in pool.batch(step, 3)[1]:
            counts[rows[tuple(row[row != IGNORE].tolist())]] += 1
    assert counts == [4, *[1] * 10, 4]


def test_distinct_counts_what_was_shown(work: Path) -> None:
    plain = TokenPool(work, "train", CaptionWords(15))
    assert [plain.distinct(steps, 4) for steps in (0, 1, 2, 3, 9)] == [0, 4, 8, 12, 12]
    captions = ["a red circle left of a blue ring"] * 11 + ["a red circle"]
    (work / "train.captions.json").write_text(json.dumps(captions))
    often = TokenPool(work, "train", CaptionWords(15), emphasis=4)
    shown = {tuple(r[r != IGNORE].tolist()) for k in range(4) for r in often.batch(k, 4)[1]}
    assert often.distinct(4, 4) == len(shown) < 12


def test_dropping_replaces_captions_by_the_empty_one(work: Path) -> None:
    words = CaptionWords(15)
    dropped = TokenPool(work, "train", words, drop=1.0).batch(0, 4)[0]
    assert dropped[:, :2].tolist() == [[words.bos, words.boi]] * 4
    saved = TokenPool(work, "train", words, drop=0.0).batch(0, 4)[0]
    assert (saved[:, 1] > words.pad).all()


def test_step_size_rises_stays_and_falls() -> None:
    plan = GeneratorTraining(steps=100, fall=20, warmup=10)
    assert plan.share(0) == pytest.approx(0.1)
    assert plan.share(9) == plan.share(50) == plan.share(80) == 1
    assert plan.share(90) == pytest.approx(0.5)
    assert plan.share(100) == 0


def test_a_stopped_run_goes_on(work: Path) -> None:
    for steps, snapshot, emphasis in ((2, 1, 1), (3, 3, 2)):
        plan = dict(fall=1, batch=4, snapshots=(snapshot,), emphasis=emphasis)
        task = scenes.Scenes(work, emphasis)
        train_generator(work, task, GeneratorTraining(steps=steps, **plan))  # type: ignore[arg-type]
    lines = [json.loads(line) for line in (work / "generator.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [2, 3]
    assert scenes_commands(work).splitlines() == [
        "python scripts/train_demo.py tokenizer",
        "python scripts/train_demo.py data",
        "python scripts/train_demo.py generator --steps 2 --fall 1 --batch 4",
        "python scripts/train_demo.py generator --steps 3 --fall 1 --batch 4 --emphasis 2"
        "  # from step 2",
        "python scripts/train_demo.py export",
        "python scripts/train_demo.py card",
    ]
    from transformers import AutoModelForCausalLM

    for folder in ("snapshots/step-1", "snapshots/step-3", "generator"):
        model = AutoModelForCausalLM.from_pretrained(work / folder)
        assert model.config.vocab_size == CaptionWords(15).vocab_size
    saved = torch.load(work / "generator.pt", weights_only=True)
    assert saved["step"] == 3


def test_training_begins_from_trained_weights(work: Path) -> None:
    torch.manual_seed(7)
    trained = scenes.build_generator(CaptionWords(15))
    save_half(trained, work / "trained")
    still = GeneratorTraining(
        steps=1, fall=1, batch=4, snapshots=(), rate=0.0, rate_rest=0.0, start=str(work / "trained")
    )
    train_generator(work, scenes.Scenes(work), still)
    saved = torch.load(work / "generator.pt", weights_only=True)["model"]
    for name, value in trained.state_dict().items():
        assert torch.equal(saved[name], value.half().float())


class Tokens:
    """An image tokenizer of 15 codes whose images are blank."""

    vocab_size, grid, size = 15, (16, 16), 4
    device = torch.device("cpu")

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(tokens), 3, 4, 4)


def test_greedy_images_follow_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy tokens equal those of full passes without a cache, row by row, without padding."""
    monkeypatch.setattr(scenes, "WIDTH", 32)
    monkeypatch.setattr(scenes, "INNER", 32)
    monkeypatch.setattr(scenes, "DEPTH", 2)
    torch.manual_seed(0)
    words = CaptionWords(15)
    model = scenes.build_generator(words).eval()
    for p in model.parameters():
        p.data.mul_(4)
    captions = ["a red circle", "a small blue star at night"]
    pipe = TextToImage(WordImages(CausalLMWindow(model, vocab_size=15), Tokens(), words))
    drawn = pipe(captions, policy=Jacobi(16), guidance_scale=2.0, temperature=0).tokens
    assert drawn.shape == (2, 256) and int(drawn.max()) < 15
    for caption, row in zip(captions, drawn, strict=True):
        wanted = torch.tensor([words.encode(caption) + row.tolist()])
        free = torch.tensor([words.unconditional() + row.tolist()])
        with torch.no_grad():
            c = model(wanted).logits[0, -257:-1, :15]
            u = model(free).logits[0, -257:-1, :15]
        assert torch.equal((u + 2 * (c - u)).argmax(-1), row)


def test_psnr_and_weights_by_hand() -> None:
    class Half(torch.nn.Module):
        def encode(self, images: torch.Tensor) -> torch.Tensor:
            return images

        def decode(self, images: torch.Tensor) -> torch.Tensor:
            return images + 0.1

    images = np.full((3, 3, 64, 64), 51, np.uint8)
    assert psnr(Half(), images) == pytest.approx(20.0, abs=1e-3)  # type: ignore[arg-type]
    image = torch.full((1, 3, 9, 9), 0.5)
    image[0, :, 4, 4] = torch.tensor([0.9, 0.1, 0.1])
    weight = object_weight(image, gain=3.0)
    assert weight.mean() == pytest.approx(1.0)
    assert int((weight > 1).sum()) == 25
    assert float(weight.max() / weight.min()) == pytest.approx(4.0)
    assert as_float(images).max() == pytest.approx(0.2)
