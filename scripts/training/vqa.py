"""`scenes-vqa`, a small `LlavaNextForConditionalGeneration`: its sizes, its training, its accuracy.

Three stages, each of which begins from the one before and lies in a folder of its own:

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

from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy

from mmaccel.demo.scenes_vqa.data import TRAIN_SEED, VALIDATION_SEED, Examples, make_examples
from mmaccel.demo.scenes_vqa.layout import CANVAS, BusyScene
from mmaccel.demo.scenes_vqa.processor import BOS, EOS, IMAGE, PAD, PINPOINTS, WORDS, make_tokenizer
from mmaccel.demo.scenes_vqa.questions import KINDS, Question
from mmaccel.demo.scenes_vqa.views import GRID, PATCH, TILES, VIEWS, split_views
from scripts.training.data import IGNORE
from scripts.training.generator import GeneratorTraining, Task, train_generator
from scripts.training.vqa_tower import Tower, tower_config

WIDTH, DEPTH, HEADS, INNER = 192, 6, 6, 448
STAGES = ("tower", "language", "full")
PLANS = {  # 8 images a step
    "tower": GeneratorTraining(steps=3600, fall=1000, batch=8, snapshots=(), mixed=False),
    "language": GeneratorTraining(steps=8500, fall=1500, batch=8, snapshots=(), mixed=False),
    "full": GeneratorTraining(
        steps=1500, fall=1000, batch=8, rate=1.5e-3, rate_rest=1e-3, snapshots=(), mixed=False
    ),
}
ASKED = {  # questions of a kind about a training image: many of those that compare places
    "colour": 1,
    "shape": 1,
    "size": 1,
    "count": 5,
    "relation": 10,
    "neighbour": 8,
    "exists": 1,
    "sign": 2,
    "dot": 1,
    "side": 5,
}
_SHOWN = 1 / 8
_NEWLINE = VIEWS * GRID * GRID  # index of the newline among the features of an image


def visual_order() -> Tensor:
    """Index of each visual token among the patches of all views, [520]; newlines are 500.

    The whole image comes first, then the tiles' patches row by row, a newline after each row.
    """
    patches = torch.arange(VIEWS * GRID * GRID).view(VIEWS, GRID, GRID)
    tiles = patches[1:].view(TILES, TILES, GRID, GRID).transpose(1, 2).reshape(TILES * GRID, -1)
    newlines = torch.full((TILES * GRID, 1), _NEWLINE)
    return torch.cat([patches[0].flatten(), torch.cat([tiles, newlines], 1).flatten()])


ORDER = visual_order()
N_VISUAL = len(ORDER)


def build_model() -> Any:
    """A new model with random weights, float32."""
    from transformers import LlamaConfig, LlavaNextConfig, LlavaNextForConditionalGeneration

    text = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model: Any = LlavaNextForConditionalGeneration(
        LlavaNextConfig(
            vision_config=tower_config().to_dict(),
            text_config=text.to_dict(),
            image_token_index=IMAGE,
            vision_feature_layer=-1,
            vision_feature_select_strategy="default",
            image_grid_pinpoints=PINPOINTS,
            image_seq_length=GRID * GRID,
            tie_word_embeddings=False,
        )
    )
    model.generation_config.bos_token_id = BOS
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = PAD
    return model


def ask_places(scene: BusyScene) -> list[Question]:
    """Where each object lies: tenths of the image from the left, then from the top, as a number."""
    return [
        Question(
            "place",
            f"what number is the {thing.colour} {thing.shape}?",
            f"{int(10 * thing.x / CANVAS)}{int(10 * thing.y / CANVAS)}",
        )
        for thing in scene.things
    ]


@cache
def _open_tokenizer() -> Any:
    return make_tokenizer()


def encode_questions(questions: list[list[Question]]) -> Tensor:
    """Questions of B images as [B, 3, T] int16: ids, number of the question from 1, labels.

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
        ids, segments, labels = [], [], []
        for k, _ in enumerate(row, 1):
            whole, answer = next(both)
            ids += whole
            segments += [k] * len(whole)
            labels += [IGNORE] * (len(whole) - len(answer) - 1) + answer + [EOS]
        rows.append(torch.tensor([ids, segments, labels], dtype=torch.int16))
    packed = torch.zeros(len(rows), 3, max(r.shape[1] for r in rows), dtype=torch.int16)
    packed[:, 0], packed[:, 2] = PAD, IGNORE
    for b, encoded in enumerate(rows):
        packed[b, :, : encoded.shape[1]] = encoded
    return packed


def choose_tokens(maps: Tensor, seed: int) -> Tensor:
    """Visual tokens that show something, and random others up to the fullest row, [B, K] sorted."""
    fine = avg_pool2d((maps > 0).float(), PATCH)
    tiles = fine.unflatten(1, (TILES, GRID)).unflatten(3, (TILES, GRID)).transpose(2, 3).flatten(1)
    patches = torch.cat([avg_pool2d(fine, TILES).flatten(1), tiles], 1) >= _SHOWN
    patches = torch.cat([patches, torch.zeros(len(maps), 1, dtype=torch.bool)], 1)
    wanted = patches[:, ORDER].float()
    rng = torch.Generator().manual_seed(seed)
    order = wanted + torch.rand(wanted.shape, generator=rng)
    return order.topk(int(wanted.sum(1).max()) + 8, dim=1).indices.sort(1).values


def answer_logits(
    model: Any, views: Tensor, packed: Tensor, kept: Tensor | None = None, frozen: bool = False
) -> tuple[Tensor, Tensor]:
    """Logits of all answers about all images.

    Args:
        model: of `build_model`.
        views: [B, 5, 3, 40, 40].
        packed: [B, 3, T] of `encode_questions`.
        kept: visual tokens that are there, [B, K], sorted; all where not given.
        frozen: whether the tower stays as it is.

    Returns:
        Logits [N, words] and labels [N], in the order of the packed questions.
    """
    ids, segments, labels = packed.long().unbind(1)
    batch, length = ids.shape
    if kept is None:
        kept = torch.arange(N_VISUAL, device=ids.device).expand(batch, -1)
    embed = model.get_input_embeddings()
    with torch.set_grad_enabled(not frozen and torch.is_grad_enabled()):
        states = model.model.vision_tower(views.flatten(0, 1), output_hidden_states=True)
        states = states.hidden_states[-1][:, 1:].reshape(batch, VIEWS * GRID * GRID, -1)
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
    causal = torch.ones(front + length, front + length, dtype=torch.bool, device=ids.device).tril()
    hidden = model.model.language_model(
        inputs_embeds=embeddings,
        attention_mask=(mask & causal)[:, None],
        position_ids=positions,
        use_cache=False,
    ).last_hidden_state[:, front:]
    said = labels != IGNORE
    return model.lm_head(hidden[said]), labels[said]


class Answers:
    """Stages 2 and 3: images and questions to answers; see `scripts.training.generator.Task`.

    Args:
        full: all visual tokens and a tower that learns; else those of `choose_tokens`.
        checks: validation images; three questions a kind about each.
        compiled: `torch.compile` the language model (needs a C compiler; training is 1.4 times
            as fast on a CPU).
    """

    def __init__(self, full: bool, checks: int = 64, compiled: bool = False) -> None:
        self.options: dict[str, Any] = {"asked": ASKED}
        self.full, self.compiled = full, compiled
        found = [
            make_examples(VALIDATION_SEED, range(k, min(k + 16, checks)), per_kind=3)
            for k in range(0, checks, 16)
        ]
        self.checks = [_pack(part, part.questions) for part in found]
        self.kinds = [q.kind for part in found for row in part.questions for q in row]

    def build(self, start: str | None) -> Any:
        """See `Task`; `start` is the work folder of the stage before."""
        model = build_model()
        if start is not None:
            file = Path(start) / "generator.pt"
            state = torch.load(file, map_location="cpu", weights_only=True)["average"]
            if self.full:
                model.load_state_dict(state)
            else:
                tower = {k.removeprefix("tower."): v for k, v in state.items() if "tower." in k}
                model.model.vision_tower.load_state_dict(tower)
        model.model.vision_tower.requires_grad_(self.full)
        if self.compiled:  # in place, so that the names of the weights stay
            model.model.language_model.compile(dynamic=True)
        return model

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Images with maps [B, 4, 80, 80] uint8, and packed questions [B, 3, T], of a batch."""
        examples = make_examples(TRAIN_SEED, range(step * size, (step + 1) * size), ASKED)
        places = [ask_places(scene) for scene in examples.scenes]
        both = zip(examples.questions, places, strict=True)
        return _pack(examples, [asked + more for asked, more in both])

    def distinct(self, steps: int, size: int) -> int:
        """See `Task`; every image is drawn once."""
        return steps * size

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        """See `Task`: nats per token of the answers and their ends."""
        return cross_entropy(*self._logits(model, ids, labels, step))

    def _logits(self, model: Any, seen: Tensor, packed: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        kept = None if self.full else choose_tokens(seen[:, 3].cpu(), seed).to(packed.device)
        return answer_logits(model, split_views(seen[:, :3]), packed, kept, not self.full)

    @torch.no_grad()
    def validate(self, model: Any, device: str) -> dict[str, float]:
        """Nats per token, and shares of questions answered rightly: all, and by kind."""
        model.eval()
        total, count, right = 0.0, 0, []
        for k, (seen, packed) in enumerate(self.checks):
            logits, labels = self._logits(model, seen.to(device), packed.to(device), k)
            total += float(cross_entropy(logits, labels, reduction="sum"))
            count += len(labels)
            right += split_right((logits.argmax(-1) == labels).tolist(), labels.tolist())
        model.train()
        found = {"validation": total / count, "right": sum(right) / len(right)}
        by_kind = defaultdict(list)
        for kind, is_right in zip(self.kinds, right, strict=True):
            by_kind[kind].append(is_right)
        return found | {kind: sum(by_kind[kind]) / len(by_kind[kind]) for kind in KINDS}


def _pack(examples: Examples, questions: list[list[Question]]) -> tuple[Tensor, Tensor]:
    """Images with maps [B, 4, 80, 80] uint8, and packed questions [B, 3, T]."""
    seen = torch.cat([examples.images, examples.maps[:, None]], 1)
    return seen, encode_questions(questions)


def split_right(right: list[bool], labels: list[int]) -> list[bool]:
    """Whether each answer, up to its end, is right in every token."""
    answers, so_far = [], True
    for is_right, label in zip(right, labels, strict=True):
        so_far = so_far and is_right
        if label == EOS:
            answers.append(so_far)
            so_far = True
    return answers


def train_vqa(
    work: str | Path,
    plans: dict[str, GeneratorTraining],
    device: str = "cpu",
    compiled: bool = False,
) -> None:
    """Trains all stages, or goes on training.

    Args:
        work: receives a folder a stage, each as `train_generator` says.
        plans: of each stage, such as `PLANS`.
        device: "cpu" or "cuda".
        compiled: see `Answers`.
    """
    before: str | None = None
    for stage in STAGES:
        folder = Path(work) / stage
        folder.mkdir(parents=True, exist_ok=True)
        task: Task
        task = Tower() if stage == "tower" else Answers(stage == "full", compiled=compiled)
        train_generator(folder, task, replace(plans[stage], start=before), device)
        before = str(folder)
