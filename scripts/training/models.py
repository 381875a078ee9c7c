"""The models that are trained here: their stages, and what their folders hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmaccel.catalog import DEMO_WEIGHTS
from mmaccel.demo.recall.words import ANSWERED, WORDS, make_tokenizer
from mmaccel.demo.scenes_vqa.processor import make_processor
from mmaccel.tokenizers_vq.autoencoder import load_tokenizer
from mmaccel.tokenizers_vq.multi_scale import load_multi_scale
from mmaccel.tokenizers_vq.speech_codec import SpeechCodec, load_codec
from scripts.training import (
    grammar,
    next_scale,
    recall,
    scenes,
    stdlib,
    voices,
    voices_masked,
    vqa,
    vqa_tower,
)
from scripts.training.loop import WEIGHTS, Plan, Task
from scripts.training.voices_data import Pool, open_pool
from scripts.training.voices_words import LONGEST, SPEAKERS, save_text_side


@dataclass(frozen=True)
class Model:
    """A model that ships, or will.

    Attributes:
        plans: of its stages, in order.
        open: a stage, the work folder and a device to the task.
        finish: adds to the exported folder what is no weights, from the work folder.
        parts: the stages whose weights are kept, and where in the folder; the last one, at its top.
        home: holds the folder of the model: that of what ships, or of what this repository alone
            measures with.
    """

    plans: Mapping[str, Plan]
    open: Callable[[str, Path, str], Task]
    finish: Callable[[Path, Path], None]
    parts: Mapping[str, str] = field(default_factory=dict)
    home: Path = DEMO_WEIGHTS


def _weights(work: Path, stage: str) -> Path:
    return work / stage / "weights"


def _write(target: Path, facts: dict[str, Any]) -> None:
    (target / "words.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _open_pictures(kind: scenes.Kind) -> Callable[[str, Path, str], Task]:
    def open_stage(stage: str, work: Path, device: str) -> Task:
        if stage == "tokenizer":
            return scenes.Tokenizer(kind)
        return scenes.Generator(kind, _weights(work, "tokenizer"), device)

    return open_stage


def _finish_pictures(kind: scenes.Kind) -> Callable[[Path, Path], None]:
    def finish(work: Path, target: Path) -> None:
        words = kind.vocabulary(load_tokenizer(target).vocab_size)
        facts: dict[str, Any] = {"words": words.words, "max_words": words.max_words}
        if kind.world.n_frames > 1:
            facts |= {"n_frames": kind.world.n_frames, "fps": 5}
        _write(target, facts)

    return finish


def _finish_masked(work: Path, target: Path) -> None:
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    facts = json.loads((DEMO_WEIGHTS / "scenes" / "words.json").read_text(encoding="utf-8"))
    facts |= {"mask": config["mask_token_id"], "logit_shift": config["logit_shift"]}
    _write(target, facts | {"picture_tokenizer": "scenes"})


def _finish_next_scale(work: Path, target: Path) -> None:
    words = scenes.STILLS.vocabulary(load_multi_scale(target).vocab_size)
    _write(target, {"words": words.words, "max_words": words.max_words})


def _open_next_scale(stage: str, work: Path, device: str) -> Task:
    if stage == "tokenizer":
        return next_scale.Tokenizer(scenes.STILLS)
    return next_scale.Generator(scenes.STILLS, _weights(work, "tokenizer"), device)


def _finish_vqa(work: Path, target: Path) -> None:
    make_processor().save_pretrained(target / "processor")


def _finish_recall(work: Path, target: Path) -> None:
    make_tokenizer().save_pretrained(target)
    _write(target, {"words": WORDS, "questions": ANSWERED})


def _open_voices(stage: str, work: Path, device: str) -> Task:
    pools = {name: open_pool(work, name, *fixed) for name, fixed in voices.POOLS.items()}
    if stage == "codec":
        return voices.Codec(pools["codec"], pools["validation"])
    codec = load_codec(_weights(work, "codec"))
    text, held_out = (_open_text(work, name, codec)[1] for name in ("train", "validation"))
    if stage == "flat":
        return voices.Flat(text, held_out)
    return voices.Depth(text, held_out, codec)


def _open_text(work: Path, name: str, codec: SpeechCodec) -> tuple[Pool, voices.SpokenText]:
    pool = open_pool(work, name, *voices.POOLS[name])
    return pool, voices.SpokenText(pool, codec, work / f"{name}.codes.pt")


def _open_voices_masked(_: str, work: Path, device: str) -> Task:
    codec = load_codec(DEMO_WEIGHTS / "voices")
    text, held_out = (_open_text(work, name, codec)[1] for name in ("train", "validation"))
    return voices_masked.MaskedSpeech(text, held_out, codec.flat_size, codec.book_size)


def _finish_voices_masked(work: Path, target: Path) -> None:
    codec = load_codec(DEMO_WEIGHTS / "voices")
    pool, text = _open_text(work, "train", codec)
    durations = voices_masked.fit_durations(pool, text, codec.flat_size)
    save_text_side(target, codec, SPEAKERS, pool.lexicon, LONGEST, 0, durations=durations)


def _finish_voices(work: Path, target: Path) -> None:
    pool = open_pool(work, "train", *voices.POOLS["train"])
    save_text_side(target, load_codec(target), SPEAKERS, pool.lexicon, LONGEST)


PICTURES = {"tokenizer": "", "generator": ""}
MODELS = {
    "scenes": Model(
        scenes.PLANS["scenes"],
        _open_pictures(scenes.STILLS),
        _finish_pictures(scenes.STILLS),
        PICTURES,
    ),
    "scenes-masked": Model(
        scenes.PLANS["scenes-masked"],
        lambda _, work, device: scenes.MaskedGenerator(
            scenes.STILLS, DEMO_WEIGHTS / "scenes", device
        ),
        _finish_masked,
    ),
    "scenes-var": Model(next_scale.PLANS, _open_next_scale, _finish_next_scale, PICTURES),
    "moving-scenes": Model(
        scenes.PLANS["moving-scenes"],
        _open_pictures(scenes.CLIPS),
        _finish_pictures(scenes.CLIPS),
        PICTURES,
    ),
    "grammar-masked": Model(
        {"masked": grammar.PLAN},
        lambda *_: grammar.Grammar(),
        lambda _, target: _write(target, grammar.describe()),
        home=WEIGHTS,
    ),
    "scenes-vqa": Model(
        vqa.PLANS,
        lambda stage, *_: vqa_tower.Tower() if stage == "tower" else vqa.Answers(stage == "full"),
        _finish_vqa,
    ),
    "recall": Model(recall.PLANS, lambda stage, *_: recall.Recall(stage), _finish_recall),
    "stdlib": Model(stdlib.PLANS, lambda *_: stdlib.Stdlib(), lambda *_: None, home=WEIGHTS),
    "voices-masked": Model(
        {"masked": voices_masked.PLAN}, _open_voices_masked, _finish_voices_masked
    ),
    "voices": Model(
        voices.PLANS, _open_voices, _finish_voices, {"codec": "", "depth": "depth", "flat": ""}
    ),
}
