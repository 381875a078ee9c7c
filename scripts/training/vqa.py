"""`scenes-vqa`, a small `LlavaNextForConditionalGeneration`, trained in three stages, each of which
begins from the one before.

1. `tower`: the vision tower learns what every patch shows (`scripts.training.vqa_tower`);
2. `language`: the tower is frozen; projector and language model learn to answer from the visual
   tokens that show something, at their own positions, and a few others: a third of all tokens;
3. `full`: all weights learn from all tokens.

Questions that compare places are learnt last, so training asks more of them, and asks a question
of its own, where each object lies (`ask_places`). Validation asks as many of each kind.

All questions about an image share one sequence: each sees the image and itself alone, and stands at
the positions that it would have on its own, so the answers are those of separate prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy
from torch.nn.utils.rnn import pad_sequence

from mmaccel.demo.scenes_vqa.data import (
    CANVAS,
    TRAIN_SEED,
    VALIDATION_SEED,
    BusyScene,
    Examples,
    Question,
    make_examples,
)
from mmaccel.demo.scenes_vqa.processor import (
    BOS,
    EOS,
    IMAGE,
    N_WORDS,
    PAD,
    PATCH,
    PINPOINTS,
    make_tokenizer,
)
from scripts.training.loop import IGNORE, Batch, Plan, Task
from scripts.training.vqa_tower import (
    GRID,
    SHOWN,
    TILES,
    VIEWS,
    cut_tiles,
    split_views,
    tower_config,
)

SIZES: dict[str, Any] = dict(
    hidden_size=192, intermediate_size=448, num_hidden_layers=6, num_attention_heads=6
)
PLANS = {
    "tower": Plan(3600, 1000, 8),
    "language": Plan(8500, 1500, 8),
    "full": Plan(1500, 1000, 8, rate=1.5e-3, rate_rest=1e-3),
}
ASKED = {  # questions of a kind about a training image: many of those that compare places
    **dict.fromkeys(("colour", "shape", "size", "exists", "dot"), 1),
    **{"count": 5, "relation": 10, "neighbour": 8, "sign": 2, "side": 5},
}
_NEWLINE = VIEWS * GRID * GRID  # index of the newline among the features of an image


def visual_order() -> Tensor:
    """Index of each visual token among the patches of all views, [520]; newlines are 500.

    The whole image comes first, then the tiles' patches row by row, a newline after each row.
    """
    patches = torch.arange(_NEWLINE).view(VIEWS, GRID, GRID)
    tiles = patches[1:].view(TILES, TILES, GRID, GRID).transpose(1, 2).reshape(TILES * GRID, -1)
    newlines = torch.full((TILES * GRID, 1), _NEWLINE)
    return torch.cat([patches[0].flatten(), torch.cat([tiles, newlines], 1).flatten()])


ORDER = visual_order()
N_VISUAL = len(ORDER)


def build_model() -> Any:
    """A new model with random weights, float32."""
    from transformers import LlamaConfig, LlavaNextConfig, LlavaNextForConditionalGeneration

    special: dict[str, Any] = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    text = LlamaConfig(vocab_size=N_WORDS, max_position_embeddings=4096, **SIZES, **special)
    config = LlavaNextConfig(
        vision_config=tower_config().to_dict(),
        text_config=text.to_dict(),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_grid_pinpoints=PINPOINTS,
        image_seq_length=GRID * GRID,
        tie_word_embeddings=False,
    )
    model: Any = LlavaNextForConditionalGeneration(config)
    model.generation_config.update(**special)
    return model


def ask_places(scene: BusyScene) -> list[Question]:
    """Where each object lies: tenths of the image from the left, then from the top, as a number."""
    questions = []
    for thing in scene.objects:
        text = f"what number is the {thing.colour} {thing.shape}?"
        tenths = [int(10 * v / CANVAS) for v in (thing.x, thing.y)]
        questions.append(Question("place", text, "{}{}".format(*tenths)))
    return questions


@cache
def _open_tokenizer() -> Any:
    return make_tokenizer()


def encode_questions(questions: list[list[Question]]) -> Tensor:
    """Questions of B images as [B, 3, T] int64: ids, number of the question from 1, labels.

    Labels stand where the token is predicted, `IGNORE` elsewhere. Rows are padded on the right with
    question 0.
    """
    tokenizer = _open_tokenizer()
    texts = [f"{q.text} {q.answer}" for row in questions for q in row]
    answers = [q.answer for row in questions for q in row]
    both = zip(
        tokenizer(texts, add_special_tokens=False)["input_ids"],
        tokenizer(answers, add_special_tokens=False)["input_ids"],
        strict=True,
    )
    rows = []
    for row in questions:
        parts = []
        for k, _ in enumerate(row, 1):
            whole, answer = next(both)
            labels = [IGNORE] * (len(whole) - len(answer) - 1) + answer + [EOS]
            parts.append(torch.tensor([whole, [k] * len(whole), labels]))
        rows.append(torch.cat(parts, 1))
    padding = ((0, PAD), (1, 0), (2, IGNORE))
    return torch.stack([pad_sequence([r[k] for r in rows], True, p) for k, p in padding], 1)


def choose_tokens(maps: Tensor, seed: int) -> Tensor:
    """Visual tokens that show something in maps [B, 80, 80], and random others up to the fullest
    row, [B, K] sorted.
    """
    fine = avg_pool2d((maps > 0).float(), PATCH)
    whole = avg_pool2d(fine, TILES).flatten(1)
    patches = torch.cat([whole, cut_tiles(fine[:, None], GRID).flatten(1)], 1) >= SHOWN
    patches = torch.cat([patches, torch.zeros(len(maps), 1, dtype=torch.bool)], 1)
    wanted = patches[:, ORDER].float()
    rng = torch.Generator().manual_seed(seed)
    order = wanted + torch.rand(wanted.shape, generator=rng)
    return order.topk(int(wanted.sum(1).max()) + 8, dim=1).indices.sort(1).values


def answer_logits(
    model: Any, views: Tensor, packed: Tensor, kept: Tensor | None = None, frozen: bool = False
) -> tuple[Tensor, Tensor]:
    """Logits [N, words] and labels [N] of all answers about all images, in the order of the packed
    questions [B, 3, T]. Views are [B, 5, 3, 40, 40]; visual tokens that are there, `kept`, [B, K],
    sorted; `frozen`: the tower stays as it is.
    """
    ids, segments, labels = packed.unbind(1)
    batch, length = ids.shape
    if kept is None:
        kept = torch.arange(N_VISUAL, device=ids.device).expand(batch, -1)
    embed = model.get_input_embeddings()
    with torch.set_grad_enabled(not frozen and torch.is_grad_enabled()):
        states = model.model.vision_tower(views.flatten(0, 1), output_hidden_states=True)
        states = states.hidden_states[-1][:, 1:].reshape(batch, _NEWLINE, -1)
    sources = ORDER.to(ids.device)[kept]
    rows = torch.arange(batch, device=ids.device)[:, None]
    visual = model.model.multi_modal_projector(states[rows, sources.clamp(max=_NEWLINE - 1)])
    visual = torch.where((sources == _NEWLINE)[..., None], model.model.image_newline, visual)
    start = embed(torch.full((batch, 1), BOS, device=ids.device))
    embeddings = torch.cat([start, visual, embed(ids)], 1)
    columns = torch.arange(length, device=ids.device)
    begins = (segments[:, :, None] == segments[:, None, :]).int().argmax(2)
    positions = torch.cat(
        [torch.zeros_like(kept[:, :1]), kept + 1, columns - begins + 1 + N_VISUAL], 1
    )
    front = kept.shape[1] + 1
    owner = torch.cat([segments.new_full((batch, front), -1), segments], 1)
    mask = (owner[:, None, :] == -1) | (owner[:, :, None] == owner[:, None, :])
    hidden = model.model.language_model(
        inputs_embeds=embeddings,
        attention_mask=mask.tril()[:, None],
        position_ids=positions,
        use_cache=False,
    ).last_hidden_state[:, front:]
    said = labels != IGNORE
    return model.lm_head(hidden[said]), labels[said]


class Answers(Task):
    """Stages 2 and 3: images and questions to answers.

    Args:
        full: all visual tokens and a tower that learns; else those of `choose_tokens`.
        checks: validation images; three questions a kind about each.
    """

    def __init__(self, full: bool, checks: int = 64) -> None:
        self.full = full
        firsts = range(0, checks, 16)
        self.checks = [
            self._examples(VALIDATION_SEED, range(k, min(k + 16, checks)), 3) for k in firsts
        ]

    def build(self, before: Path | None) -> Any:
        model = build_model()
        if before is not None:
            state = torch.load(before / "state.pt", map_location="cpu", weights_only=True)
            weights = state["average"]
            if self.full:
                model.load_state_dict(weights)
            else:
                tower = {k.removeprefix("tower."): v for k, v in weights.items() if "tower." in k}
                model.model.vision_tower.load_state_dict(tower)
        model.model.vision_tower.requires_grad_(self.full)
        return model

    def batch(self, step: int, size: int) -> Batch:
        """Images with maps [B, 4, 80, 80] uint8, and packed questions [B, 3, T]."""
        return self._examples(TRAIN_SEED, range(step * size, (step + 1) * size), ASKED, True)

    def _examples(
        self, seed: int, indices: range, per_kind: int | Mapping[str, int], places: bool = False
    ) -> Batch:
        examples: Examples = make_examples(seed, indices, per_kind)
        questions = examples.questions
        if places:
            both = zip(questions, examples.scenes, strict=True)
            questions = [asked + ask_places(scene) for asked, scene in both]
        seen = torch.cat([examples.images, examples.maps[:, None]], 1)
        return seen, encode_questions(questions)

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        return cross_entropy(*self._logits(model, ids, labels, step))

    def _logits(self, model: Any, seen: Tensor, packed: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        kept = None if self.full else choose_tokens(seen[:, 3].cpu(), seed).to(packed.device)
        return answer_logits(model, split_views(seen[:, :3]), packed, kept, not self.full)

    def validate(self, model: Any, device: str) -> dict[str, float]:
        """Nats per token, and the share of tokens of answers that are the likeliest."""
        total, count, right = 0.0, 0, 0
        for k, (seen, packed) in enumerate(self.checks):
            logits, labels = self._logits(model, seen.to(device), packed.to(device), k)
            total += float(cross_entropy(logits, labels, reduction="sum"))
            count += len(labels)
            right += int((logits.argmax(-1) == labels).sum())
        return {"validation": total / count, "right": right / count}
