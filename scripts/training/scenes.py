"""`scenes`, a small Llama over words and image tokens: the model, its training task, its figures.

Touvron et al., 2023, arXiv 2302.13971, section 2.2, by way of transformers' `LlamaForCausalLM`.
Departures: none but the size. The figures are those of the model card; none is typed in.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmaccel.contracts import Policy
from mmaccel.demo.scenes.checker import score_images
from mmaccel.demo.scenes.data import EVALUATION_SEED, CaptionWords, make_captions, make_scenes
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.models.scenes import WordImages
from mmaccel.pipelines.text_to_image.outputs import join
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.jacobi import Jacobi
from mmaccel.samplers.window.speculative_jacobi import SpeculativeJacobi
from mmaccel.tokenizers_vq.autoencoder import ImageTokenizer, load_tokenizer
from scripts.training.data import IGNORE, TokenPool, as_float, open_pool
from scripts.training.generator import load_generator, read_weights
from scripts.training.optim import mixed_precision
from scripts.training.scenes_tokenizer import psnr

N_IMAGE_TOKENS = 256
WIDTH, DEPTH, HEADS, INNER = 256, 6, 4, 704


def build_generator(words: CaptionWords) -> Any:
    """A new `LlamaForCausalLM` with random weights, float32.

    Args:
        words: fixes the vocabulary.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=words.vocab_size,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=DEPTH,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=words.max_words + 2 + N_IMAGE_TOKENS,
            tie_word_embeddings=False,
            initializer_range=0.02,
            bos_token_id=words.bos,
            eos_token_id=None,
            pad_token_id=words.pad,
            use_cache=True,
        )
    )


def image_loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the image tokens, in nats.

    Args:
        model: a causal LM.
        ids: [B, T] int64, padded on the right (causal attention never reaches the padding, so
            no mask is needed).
        labels: [B, T] int64, `IGNORE` everywhere but on image tokens.

    Returns:
        Scalar float32.
    """
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    target = labels[:, 1:]
    chosen = target != IGNORE
    return cross_entropy(model.lm_head(hidden[chosen]).float(), target[chosen])


@torch.no_grad()
def validation_loss(model: Any, batches: list[tuple[Tensor, Tensor]], device: str) -> float:
    """Mean `image_loss` over batches of equal size, nats per token."""
    model.eval()
    with mixed_precision(device):
        total = sum(float(image_loss(model, i.to(device), y.to(device))) for i, y in batches)
    model.train()
    return total / len(batches)


class Scenes:
    """Captions and images of a work folder, read token by token.

    Args:
        work: holds `tokenizer/`, the pools `train` and `validation` with their tokens.
        emphasis: see `TokenPool`.
        one_shape: every batch as wide as the widest (a compiled model is compiled once).
    """

    def __init__(self, work: str | Path, emphasis: int = 1, one_shape: bool = False) -> None:
        self.options: dict[str, Any] = {}
        self.words = CaptionWords(load_tokenizer(Path(work) / "tokenizer").vocab_size)
        self.data = TokenPool(work, "train", self.words, emphasis=emphasis)
        self.width = self.data.width if one_shape else None
        held_out = TokenPool(work, "validation", self.words, drop=0.0)
        self.checks = [held_out.batch(k, 50) for k in range(10)]

    def build(self, start: str | None) -> Any:
        model = build_generator(self.words)
        if start is not None:
            model.load_state_dict(read_weights(start))
        return model

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        return self.data.batch(step, size, self.width)

    def distinct(self, steps: int, size: int) -> int:
        return self.data.distinct(steps, size)

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        return image_loss(model, ids, labels)

    def validate(self, model: Any, device: str) -> float:
        return validation_loss(model, self.checks, device)


_SAMPLE_BATCH = 50


def measure_tokenizer(
    tokenizer: ImageTokenizer, work: str | Path, count: int = 500
) -> dict[str, Any]:
    """PSNR on the validation pool, and the checker's scores on real and on reconstructed images.

    Args:
        tokenizer: to be measured.
        work: holds the pool `validation`.
        count: images for the checker, from `EVALUATION_SEED`.
    """
    held_out, _ = open_pool(work, "validation")
    _, captions, drawn = make_scenes(EVALUATION_SEED, range(count))
    images = as_float(drawn.numpy())
    again = torch.cat([tokenizer.decode(tokenizer.encode(p)) for p in images.split(100)])
    return {
        "psnr_db": round(psnr(tokenizer, held_out), 2),
        "psnr_pictures": len(held_out),
        "vocab_size": tokenizer.vocab_size,
        "codes_used": int(tokenizer.encode(as_float(held_out)).unique().numel()),
        "checker_pictures": count,
        "checker_on_pictures": _round(score_images(images, captions)),
        "checker_on_reconstructions": _round(score_images(again, captions)),
    }


def measure_loss(
    model: Any, work: str | Path, count: int = 2000, device: str = "cpu"
) -> dict[str, Any]:
    """Validation loss on `count` images of the pool `validation`, without dropping captions."""
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
    tokenizer: ImageTokenizer,
    policy: Policy,
    *,
    count: int = 500,
    guidance_scale: float = 2.0,
    temperature: float = 1.0,
    seen: Collection[str] = (),
) -> dict[str, Any]:
    """Draws images for fresh captions and has the checker read them.

    Args:
        model: the generator.
        tokenizer: decodes its tokens.
        policy: how to decode.
        count: number of captions, `EVALUATION_SEED` 0..count-1; caption k has seed k.
        guidance_scale, temperature: see `mmaccel.SamplingParams`.
        seen: captions that training had, as text; their images were others.

    Returns:
        The scores, each with the half-width of its 95 % interval (normal approximation), the scores
        of the captions that are not in `seen`, and what the images cost.
    """
    window = CausalLMWindow(model, vocab_size=tokenizer.vocab_size)
    pipe = TextToImage(WordImages(window, tokenizer, CaptionWords(tokenizer.vocab_size)))
    captions = make_captions(EVALUATION_SEED, range(count))
    params = SamplingParams(guidance_scale, temperature)
    batches = pipe.stream(
        captions, params, policy=policy, seed=range(count), batch_size=_SAMPLE_BATCH
    )
    made = join(list(batches))
    images = torch.cat([tokenizer.decode(t) for t in made.tokens.to(pipe.model.device).split(100)])
    scores = score_images(images.cpu(), captions)
    new = [k for k, caption in enumerate(captions) if caption not in seen]
    unseen = score_images(images.cpu()[new], [captions[k] for k in new]) if new else {}
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


_SETTINGS: tuple[tuple[str, Policy, float], ...] = (
    ("jacobi 32, guidance 1", Jacobi(window=32), 1.0),
    ("jacobi 32, guidance 2", Jacobi(window=32), 2.0),
    ("mc-sjd 32, guidance 2", SpeculativeJacobi(window=32), 2.0),
)


def measure_acceptance(
    work: str | Path, last_step: int, tokenizer: ImageTokenizer, count: int = 16
) -> list[dict[str, Any]]:
    """Tokens per pass of the snapshots taken while training, and of the final model.

    Args:
        work: of `train_generator`; its `snapshots/step-N` and `generator` are read.
        last_step: training step of `generator`.
        tokenizer: of the same model.
        count: fresh captions, one image each.

    Returns:
        One row per snapshot: step, validation nats (500 images), tokens per pass by setting.
    """
    work = Path(work)
    found = {int(f.name.split("-")[1]): f for f in (work / "snapshots").glob("step-*")}
    found[last_step] = work / "generator"
    captions = make_captions(EVALUATION_SEED, range(count))
    rows = []
    for step, folder in sorted(found.items()):
        model = load_generator(folder)
        window = CausalLMWindow(model, vocab_size=tokenizer.vocab_size)
        pipe = TextToImage(WordImages(window, tokenizer, CaptionWords(tokenizer.vocab_size)))
        nats = measure_loss(model, work, 500)["validation_nats_per_token"]
        row: dict[str, Any] = {"step": step, "validation nats": nats}
        for name, policy, scale in _SETTINGS:
            made = pipe(captions, policy=policy, guidance_scale=scale, seed=range(count))
            row[name] = round(made.stats.tokens_per_pass, 2)
        rows.append(row)
    return rows
