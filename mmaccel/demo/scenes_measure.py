"""The figures of the `scenes` model card, each measured here and nowhere typed in."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from mmaccel.contracts import Policy
from mmaccel.demo.picture_pool import open_pool
from mmaccel.demo.scenes_check import score_pictures
from mmaccel.demo.scenes_data import EVALUATION_SEED, make_captions, make_scenes
from mmaccel.demo.scenes_generator import validation_loss
from mmaccel.demo.scenes_words import CaptionWords
from mmaccel.demo.token_pool import TokenPool
from mmaccel.demo.train_tokenizer import as_float, psnr
from mmaccel.pipelines.picture_request import join
from mmaccel.pipelines.text_to_image import TextToImage
from mmaccel.pipelines.window_model import CausalLMWindow
from mmaccel.pipelines.word_pictures import WordPictures
from mmaccel.samplers.filters import Filters
from mmaccel.tokenizers_vq.autoencoder import PictureTokenizer
from mmaccel.tokenizers_vq.load import load_tokenizer

_SAMPLE_BATCH = 50


def load_generator(folder: str | Path, device: str = "cpu") -> Any:
    """The generator kept in a folder, float32, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval()


def measure_tokenizer(
    tokenizer: PictureTokenizer, work: str | Path, count: int = 500
) -> dict[str, Any]:
    """PSNR on the validation pool, and the checker's scores on real and on reconstructed pictures.

    Args:
        tokenizer: to be measured.
        work: holds the pool `validation`.
        count: pictures for the checker, from `EVALUATION_SEED`.
    """
    held_out, _ = open_pool(work, "validation")
    _, captions, drawn = make_scenes(EVALUATION_SEED, range(count))
    pictures = as_float(drawn.numpy())
    again = torch.cat([tokenizer.decode(tokenizer.encode(p)) for p in pictures.split(100)])
    return {
        "psnr_db": round(psnr(tokenizer, held_out), 2),
        "psnr_pictures": len(held_out),
        "vocab_size": tokenizer.vocab_size,
        "codes_used": int(tokenizer.encode(as_float(held_out)).unique().numel()),
        "checker_pictures": count,
        "checker_on_pictures": _round(score_pictures(pictures, captions)),
        "checker_on_reconstructions": _round(score_pictures(again, captions)),
    }


def measure_loss(
    model: Any, work: str | Path, count: int = 2000, device: str = "cpu"
) -> dict[str, Any]:
    """Validation loss on `count` pictures of the pool `validation`, all captions kept."""
    words = CaptionWords(load_tokenizer(Path(work) / "tokenizer").vocab_size)
    data = TokenPool(work, "validation", words, drop=0.0)
    size = 50
    nats = validation_loss(model, [data.batch(k, size) for k in range(count // size)], device)
    return {
        "validation_nats_per_token": round(nats, 4),
        "validation_bits_per_token": round(nats / math.log(2), 4),
        "validation_pictures": count,
    }


def measure_samples(
    model: Any,
    tokenizer: PictureTokenizer,
    policy: Policy,
    *,
    count: int = 500,
    guidance_scale: float = 2.0,
    temperature: float = 1.0,
    seen: Collection[str] = (),
) -> dict[str, Any]:
    """Draws pictures for fresh captions and has the checker read them.

    Args:
        model: the generator.
        tokenizer: decodes its tokens.
        policy: how to decode.
        count: number of captions, `EVALUATION_SEED` 0..count-1; caption k has seed k.
        guidance_scale, temperature: see `mmaccel.Filters`.
        seen: captions that training had, as text; their pictures were others.

    Returns:
        The scores, each with the half-width of its 95 % interval (normal approximation), the scores
        of the captions that are not in `seen`, and what the pictures cost.
    """
    window = CausalLMWindow(model, vocab_size=tokenizer.vocab_size)
    pipe = TextToImage(WordPictures(window, tokenizer, CaptionWords(tokenizer.vocab_size)))
    captions = make_captions(EVALUATION_SEED, range(count))
    filters = Filters(guidance_scale, temperature)
    batches = pipe.stream(
        captions, filters, policy=policy, seed=range(count), batch_size=_SAMPLE_BATCH
    )
    made = join(list(batches))
    pictures = torch.cat(
        [tokenizer.decode(t) for t in made.tokens.to(pipe.model.device).split(100)]
    )
    scores = score_pictures(pictures.cpu(), captions)
    new = [k for k, caption in enumerate(captions) if caption not in seen]
    unseen = score_pictures(pictures.cpu()[new], [captions[k] for k in new]) if new else {}
    return {
        "policy": repr(policy),
        "exactness": made.stats.exactness,
        "captions": count,
        "guidance_scale": guidance_scale,
        "temperature": temperature,
        "scores": _round(scores),
        "half_widths": _round(
            {name: 1.96 * math.sqrt(p * (1 - p) / count) for name, p in scores.items()}
        ),
        "unseen": {"captions": len(new), **_round(unseen)},
        "tokens_per_pass": round(made.stats.tokens_per_pass, 3),
        "seconds": round(made.stats.seconds, 1),
    }


def _round(scores: dict[str, float]) -> dict[str, float]:
    return {k: round(v, 4) for k, v in scores.items()}
