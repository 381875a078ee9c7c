"""Acceptance against training: an undertrained model overstates what speculation gains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmaccel.contracts import Policy
from mmaccel.demo.scenes_data import EVALUATION_SEED, make_captions
from mmaccel.demo.scenes_measure import load_generator, measure_loss
from mmaccel.demo.scenes_words import CaptionWords
from mmaccel.pipelines.text_to_image import TextToImage
from mmaccel.pipelines.window_model import CausalLMWindow
from mmaccel.pipelines.word_pictures import WordPictures
from mmaccel.samplers.jacobi import Jacobi
from mmaccel.samplers.speculative_jacobi import SpeculativeJacobi
from mmaccel.tokenizers_vq.autoencoder import PictureTokenizer

_SETTINGS: tuple[tuple[str, Policy, float], ...] = (
    ("jacobi 32, guidance 1", Jacobi(window=32), 1.0),
    ("jacobi 32, guidance 2", Jacobi(window=32), 2.0),
    ("mc-sjd 32, guidance 2", SpeculativeJacobi(window=32), 2.0),
)


def measure_acceptance(
    work: str | Path, last_step: int, tokenizer: PictureTokenizer, count: int = 16
) -> list[dict[str, Any]]:
    """Tokens per pass of the snapshots taken while training, and of the final model.

    Args:
        work: of `train_generator`; its `snapshots/step-N` and `generator` are read.
        last_step: training step of `generator`.
        tokenizer: of the same model.
        count: fresh captions, one picture each.

    Returns:
        One row per snapshot: step, validation nats (500 pictures), tokens per pass by setting.
    """
    work = Path(work)
    found = {int(f.name.split("-")[1]): f for f in (work / "snapshots").glob("step-*")}
    found[last_step] = work / "generator"
    captions = make_captions(EVALUATION_SEED, range(count))
    rows = []
    for step, folder in sorted(found.items()):
        model = load_generator(folder)
        window = CausalLMWindow(model, vocab_size=tokenizer.vocab_size)
        pipe = TextToImage(WordPictures(window, tokenizer, CaptionWords(tokenizer.vocab_size)))
        nats = measure_loss(model, work, 500)["validation_nats_per_token"]
        row: dict[str, Any] = {"step": step, "validation nats": nats}
        for name, policy, scale in _SETTINGS:
            made = pipe(captions, policy=policy, guidance_scale=scale, seed=range(count))
            row[name] = round(made.stats.tokens_per_pass, 2)
        rows.append(row)
    return rows
