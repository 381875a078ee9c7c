"""Writes the folder of `moving-scenes`: float16 weights, words, measured figures, the card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mmaccel.contracts import Policy
from mmaccel.demo.moving_scenes.caption import read_caption
from mmaccel.demo.moving_scenes.data import (
    EVALUATION_SEED,
    VALIDATION_SEED,
    CaptionWords,
    make_captions,
    make_clips,
)
from mmaccel.demo.moving_scenes.layout import N_FRAMES
from mmaccel.demo.moving_scenes.tracker import score_clips, stack_frames
from mmaccel.pipelines.image_to_video.types import Clips
from mmaccel.pipelines.text_to_video.pipeline import TextToVideo
from mmaccel.samplers.window.autoregressive import Autoregressive
from mmaccel.samplers.window.jacobi import Jacobi
from mmaccel.tokenizers_vq.autoencoder import load_tokenizer
from scripts.training.cards import write_moving_card
from scripts.training.export import (
    GENERATOR_FILES,
    TOKENIZER_FILES,
    check_trained,
    copy_files,
    this_machine,
    training_cost,
    write_folder,
)
from scripts.training.moving_scenes import MovingScenes, encode_clips
from scripts.training.scenes_tokenizer import psnr

FPS = 5
POLICIES: tuple[Policy, ...] = (
    Autoregressive(),
    *(Jacobi(window=window, drafts="neighbour") for window in (16, 32, 64)),
    *(Jacobi(window=window, drafts="previous-frame") for window in (16, 32, 64)),
)
_BATCH = 20


def export_moving_scenes(work: str | Path, target: str | Path) -> None:
    """Copies tokenizer and averaged generator from `work` to `target`; writes `words.json`.

    Args:
        work: of the training.
        target: made where missing.

    Raises:
        OptionError: nothing has been trained in `work`.
    """
    work = Path(work)
    target = Path(target)
    check_trained(work / "generator")
    target.mkdir(parents=True, exist_ok=True)
    copy_files(work / "tokenizer", target, TOKENIZER_FILES)
    copy_files(work / "generator", target, GENERATOR_FILES)
    words = CaptionWords(load_tokenizer(target).vocab_size)
    text = {
        "words": list(words.words),
        "max_words": words.max_words,
        "n_frames": N_FRAMES,
        "fps": FPS,
    }
    (target / "words.json").write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")


def export_moving_scenes_card(
    work: str | Path, target: str | Path, count: int = 100, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Measures the exported folder on the CPU and writes `card.json` and `README.md` there.

    Args:
        work: holds logs and tokenizer.
        target: of `export_moving_scenes`.
        count: fresh captions for the checker, and for passes a fifth of them.
        notes: sentences about this training that its logs do not say.

    Returns:
        The content of `card.json`.
    """
    work = Path(work)
    target = Path(target)
    pipe = TextToVideo.from_pretrained(target)
    model = pipe.model.model
    size = sum(file.stat().st_size for file in target.iterdir() if file.suffix != ".md")
    card: dict[str, Any] = {
        "name": "moving-scenes",
        "command": "\n".join(
            f"python -m scripts.training moving-scenes{part} --work runs/moving-scenes"
            for part in ("", "-export", "-card")
        ),
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokenizer_parameters": sum(p.numel() for p in load_tokenizer(target).parameters()),
        "megabytes": round(size / 1e6, 2),
        "tokenizer": measure_frames(target, count),
        "generator": MovingScenes(work).validate(model, "cpu"),
        "samples": [measure_clips(pipe, scale, count) for scale in (1.0, 2.0)],
        "passes": measure_passes(pipe, max(count // 5, 1)),
        "training": training_cost(work),
        "notes": list(notes),
        "measured_with": this_machine("cpu"),
    }
    write_folder(target, card, write_moving_card(card))
    return card


def measure_frames(folder: str | Path, count: int) -> dict[str, Any]:
    """PSNR of frames, codes that occur, how many tokens stay from frame to frame, and the tracker's
    scores on real and on reconstructed clips.

    Args:
        folder: of the tokenizer.
        count: clips.
    """
    tokenizer = load_tokenizer(folder)
    _, captions, drawn = make_clips(EVALUATION_SEED, range(count))
    tokens = torch.from_numpy(encode_clips(tokenizer, drawn)).unflatten(1, (N_FRAMES, -1))
    again = torch.stack([tokenizer.decode(clip) for clip in tokens])
    _, _, held_out = make_clips(VALIDATION_SEED, range(50))
    return {
        "psnr_db": round(psnr(tokenizer, held_out.flatten(0, 1).numpy()), 2),
        "vocab_size": tokenizer.vocab_size,
        "codes_used": int(tokens.unique().numel()),
        "stay": round(float((tokens[:, 1:] == tokens[:, :-1]).float().mean()), 4),
        "clips": count,
        "tracker_on_clips": _round(score_clips(drawn.float() / 255, captions)),
        "tracker_on_reconstructions": _round(score_clips(again, captions)),
    }


def measure_clips(pipe: TextToVideo, guidance_scale: float, count: int) -> dict[str, Any]:
    """The tracker's scores on clips of fresh captions, caption k with seed k."""
    captions = make_captions(EVALUATION_SEED, range(count))
    made = _draw(pipe, captions, Jacobi(window=32), guidance_scale)
    scores = score_clips(stack_frames([clip.frames for clip in made.clips]), captions)
    return {"guidance_scale": guidance_scale, "captions": count, "scores": _round(scores)}


def measure_passes(pipe: TextToVideo, count: int) -> list[dict[str, Any]]:
    """Tokens a pass of each of `POLICIES`, of clips of one object and of two, `count` each."""
    captions = make_captions(EVALUATION_SEED, range(20 * count))
    alone = [text for text in captions if len(read_caption(text).objects) == 1][:count]
    paired = [text for text in captions if len(read_caption(text).objects) == 2][:count]
    rows = []
    for policy in POLICIES:
        for guidance_scale in (1.0, 2.0):
            row: dict[str, Any] = {"policy": repr(policy), "guidance_scale": guidance_scale}
            for name, texts in (("one object", alone), ("two objects", paired)):
                stats = _draw(pipe, texts, policy, guidance_scale).stats
                row[name] = round(stats.tokens_per_pass, 2)
            rows.append(row)
    return rows


def _draw(pipe: TextToVideo, captions: list[str], policy: Policy, guidance_scale: float) -> Clips:
    return pipe(
        captions,
        policy=policy,
        guidance_scale=guidance_scale,
        seed=range(len(captions)),
        batch_size=_BATCH,
    )


def _round(scores: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in scores.items()}
