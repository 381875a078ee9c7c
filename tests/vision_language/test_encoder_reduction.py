"""Visual tokens merged inside the vision encoder.

The reference runs a tower's layers one by one over the tokens of one image, without a batch: plans
are the method's on what the loop computed, merging and attention are written out here. The language
model behind it gets the reference's states from a tower that is a stub.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import FiCoCoV, ToMe, VisionZip
from mmaccel.pipelines.hosts.vision_language import encoder
from mmaccel.pipelines.hosts.vision_language.encoder import EncoderCall
from mmaccel.pipelines.hosts.vision_language.tower_run import TowerRun
from mmaccel.pipelines.hosts.vision_language.towers import find_tower
from mmaccel.reduction.visual_tokens.context import make_context
from tests.fixtures.lanes import mostly_slow
from tests.fixtures.tiny_lms import left_padded
from tests.fixtures.tiny_vlms import (
    IMAGE,
    EncoderOutput,
    draw_prompts,
)
from tests.vision_language.references import (
    WITH_CLASS,
    answer_to_features,
    encode,
    rows_of_tower,
)
from tests.vision_language.runs import (
    GREEDY,
    N_NEW,
    answer,
    build_looking,
    reduces,
    seen_by_tower,
    shared_looking,
)

pytestmark = reduces

NAMES = [
    "llava", "llava_next", "llava_onevision", "internvl", "idefics3", "smolvlm", "gemma3", "janus",
]  # fmt: skip
ONE_TO_ONE = {"llava", "llava_next", "llava_onevision", "janus"}
DEPTH, PATCHES = 5, 16


@pytest.fixture(params=mostly_slow(NAMES, "llava", "idefics3"))
def named(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, shared_looking(request.param, DEPTH)


def methods_for(name: str) -> list[Any]:
    found = [ToMe(keep=0.5), ToMe(keep=0.3, threshold=0.6), ToMe(n_keep=5, layers=(2, 3))]
    found += [ToMe(keep=0.4, features="all")]
    return found + ([FiCoCoV(keep=0.4)] if name in WITH_CLASS else [])


# ---------------------------------------------------------------------------- the reference


class Reference:
    """The states of one row of a tower, `[S, C]`, with the tokens that each column stands for.

    Attributes:
        states: restored to all tokens, as they left each layer; the first are the embeddings.
        members: of every column at the end, the tokens in it, their representative first.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        pixels: Tensor,
        real: Any,
        method: Any,
        seed: int,
        depth: int | None = None,
    ) -> None:
        self.method, self.seed = method, seed
        tower = find_tower(model)
        if name in ("idefics3", "smolvlm"):
            x = tower.embeddings(pixel_values=pixels[None], patch_attention_mask=real[None])[0]
        else:
            x = tower.embeddings(pixels[None])[0]
        x = tower.pre_layrnorm(x) if hasattr(tower, "pre_layrnorm") else x
        layers = getattr(tower.encoder, "layers", None) or tower.encoder.layer
        self.first = int(name in WITH_CLASS)  # patch
        usual = len(layers) - int(name in ("llava", "llava_next"))
        self.depth = usual if depth is None else depth
        self.real = torch.ones(len(x), dtype=torch.bool) if real is None else real.flatten()
        self.members = [[k] for k in range(len(x))]
        self.states = [x]
        self.keys, self.queries = Tensor(), Tensor()
        before = method.layers_in(self.depth)
        for index, layer in enumerate(layers):
            if index in before:
                x = self.merge(x, index)
            x = self.run(layer, x)
            restored = torch.empty(len(self.real), x.shape[1])
            for column, members in enumerate(self.members):
                restored[members] = x[column]
            self.states.append(restored)

    def run(self, layer: Any, x: Tensor) -> Tensor:
        own = vars(layer)["_modules"]
        attention = own.get("self_attn", own.get("attention"))
        normed = own.get("layer_norm1", own.get("layernorm_before"))(x)
        heads, width = attention.num_heads, attention.head_dim
        q, k, v = (getattr(attention, f"{n}_proj")(normed) for n in "qkv")
        q, k, v = (part.view(len(x), heads, width).transpose(0, 1) for part in (q, k, v))
        self.keys, self.queries = k, q
        out = (self.weights(q, k) @ v).transpose(0, 1).flatten(1)
        project = getattr(attention, "out_proj", getattr(attention, "projection_layer", None))
        x = x + project(out) * getattr(layer, "lambda_1", 1)
        normed = own.get("layer_norm2", own.get("layernorm_after"))(x)
        return x + layer.mlp(normed) * getattr(layer, "lambda_2", 1)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """Attention `[H, S', S']`: a key of n tokens counts as n keys."""
        scores = q @ k.mT * q.shape[-1] ** -0.5
        scores = (scores - scores.amax(-1, keepdim=True)).exp()
        counts = torch.tensor([float(len(m) if self.real[m[0]] else 0) for m in self.members])
        return scores * counts / (scores * counts).sum(-1, keepdim=True)

    def merge(self, x: Tensor, index: int) -> Tensor:
        columns = [c for c, m in enumerate(self.members) if m[0] >= self.first and self.real[m[0]]]
        tokens = torch.tensor([self.members[c][0] for c in columns]) - self.first
        mass = self.weights(self.queries, self.keys)[:, 0, columns]
        context = make_context(
            x[None, columns],
            row=tokens[None] // 4,
            column=tokens[None] % 4,
            size=torch.tensor([[float(len(self.members[c])) for c in columns]]),
            initial=(self.real.sum() - self.first)[None],
            seed=self.seed,
            layer=index,
            depth=self.depth,
            keys=lambda layer: self.keys[:, columns].transpose(0, 1)[None],
            attention=lambda layer, queries, per_head: mass.sum(0)[None],
            queries=("cls",),
        )
        plan = self.method.plan(context)
        made, members = [], []
        for column, own in enumerate(self.members):
            if column not in columns:
                made.append(x[column])
                members.append(own)
                continue
            place = columns.index(column)
            slot = plan.keep[0].tolist().index(place) if place in plan.keep[0] else None
            if slot is None:
                continue
            parts = [k for k in range(len(columns)) if int(plan.assign[0, k]) == slot]
            sizes = torch.tensor([float(len(self.members[columns[k]])) for k in parts])
            weights = sizes / sizes.sum()
            if isinstance(self.method, FiCoCoV):  # weighed by the correlation too
                weights = plan.weight[0, parts]
            made.append((x[[columns[k] for k in parts]] * weights[:, None]).sum(0))
            others = [t for k in parts if k != place for t in self.members[columns[k]]]
            members.append([*own, *others])
        self.members = members
        return torch.stack(made)


class Stub(torch.nn.Module):
    """A tower that gives out the references' states."""

    def __init__(self, tower: Any, name: str, rows: list[Reference]) -> None:
        super().__init__()
        self.config, self.patch_size = tower.config, getattr(tower.config, "patch_size", None)
        hidden = [torch.stack(states) for states in zip(*(row.states for row in rows))]
        last = hidden[-1]
        for part in ("post_layernorm", "layernorm"):
            if name not in ("llava", "llava_next") and hasattr(tower, part):
                last = getattr(tower, part)(last)
        self.made = EncoderOutput(last_hidden_state=last, hidden_states=tuple(hidden))

    def forward(self, *_: Any, **__: Any) -> Any:
        return EncoderOutput(**vars(self.made))


@torch.no_grad()
def make_references(
    model: Any, name: str, inputs: Any, method: Any, depth: int | None = None
) -> list[Reference]:
    rows, seen, found = rows_of_tower(name, inputs), dict[int, int](), []
    for pixels, real, row in rows:
        place = seen.get(row, 0)
        seen[row] = place + 1
        own = (5 + row + 0x9E3779B97F4A7C15 * place) % 2**63
        found.append(Reference(model, name, pixels, real, method, own, depth))
    return found


@torch.no_grad()
def reference_answer(
    model: Any, name: str, inputs: Any, method: Any, rows: list[Reference], modality: str = "image"
) -> Tensor:
    """Greedy tokens behind the references' states."""
    tower = find_tower(model)
    part = "vision_tower" if hasattr(model.base_model, "vision_tower") else "vision_model"
    setattr(model.base_model, part, Stub(tower, name, rows))
    try:
        made = encode(model, inputs, modality)
    finally:
        setattr(model.base_model, part, tower)
    stands = None
    if name in ONE_TO_ONE and getattr(method, "features", "auto") != "all":
        stands = list(range(PATCHES * len(rows)))
        for row, own in enumerate(rows):
            for members in own.members:
                for token in members if members[0] >= own.first else ():
                    stands[PATCHES * row + token - own.first] = (
                        PATCHES * row + members[0] - own.first
                    )
    return answer_to_features(model, name, inputs, made, stands, modality)[0]


@torch.no_grad()
def reduced_states(model: Any, method: Any, inputs: Any) -> tuple[Any, TowerRun]:
    """What the reduced tower gives out, and its run."""
    seeds = [5 + row for row in range(len(inputs["input_ids"]))]
    found = []
    with EncoderCall(model, inputs, method, seeds) as call:
        hook = find_tower(model).register_forward_hook(lambda _m, _a, made: found.append(made))
        encode(model, inputs, output_hidden_states=True)
        hook.remove()
    return found[0], call.runs["image"]


def inputs_of(name: str, model: Any, per_row: Any = (2, 0, 1)) -> dict[str, Any]:
    inputs = draw_prompts(name, model, per_row)
    if name == "idefics3":  # part of an image is padding
        mask = torch.ones(*inputs["pixel_values"].shape[:2], 16, 16)
        mask[0, 0, 8:] = 0
        inputs["pixel_attention_mask"] = mask
    return inputs


# -------------------------------------------------------------------------------- the tests


def test_the_tower_computes_what_a_loop_over_its_layers_computes(named: tuple[str, Any]) -> None:
    """Under both implementations of its attention."""
    name, model = named
    inputs = inputs_of(name, model)
    for method in methods_for(name):
        rows = make_references(model, name, inputs, method)
        last = Stub(find_tower(model), name, rows).made.last_hidden_state
        expected = reference_answer(model, name, inputs, method, rows)
        for kind in ("eager", "sdpa"):
            find_tower(model).set_attn_implementation(kind)
            made, run = reduced_states(model, method, inputs)
            for found, states in zip(
                made.hidden_states, zip(*(row.states for row in rows)), strict=True
            ):
                torch.testing.assert_close(found, torch.stack(states), rtol=2e-4, atol=2e-4)
            torch.testing.assert_close(made.last_hidden_state, last, rtol=2e-4, atol=2e-4)
            sizes = torch.tensor([sum(map(len, row.members)) for row in rows])
            hidden = torch.tensor([int((~row.real).sum()) for row in rows])
            assert torch.equal(run.size.sum(1).long(), sizes - hidden)
            tokens, stats = answer(model, method, inputs)
            assert torch.equal(tokens, expected), (method, kind)
        assert stats.exactness == "relaxed" and "tokens of its encoder" in stats.reference
        is_merged = name in ONE_TO_ONE and method.features != "all"
        assert ("visual tokens" in stats.reference) == is_merged


def test_later_layers_process_fewer_tokens(named: tuple[str, Any]) -> None:
    name, model = named
    inputs = draw_prompts(name, model)
    with seen_by_tower(model) as seen:
        answer(model, ToMe(keep=0.25), inputs)
    special = int(name in WITH_CLASS)
    expected = [16, 12, 8, 4, 4] if name in ("llava", "llava_next") else [16, 13, 10, 7, 4]
    assert [states.shape[1] for states in seen] == [n + special for n in expected]


@pytest.mark.parametrize("layer", [-1, -2, -3, [-3, -1]])
def test_states_of_any_layer(layer: Any) -> None:
    model = build_looking("llava", DEPTH)
    inputs = draw_prompts("llava", model)
    if isinstance(layer, list):
        linear = model.base_model.multi_modal_projector.linear_1
        model.base_model.multi_modal_projector.linear_1 = torch.nn.Linear(48, linear.out_features)
    method, depth = ToMe(n_keep=6, features="all"), {"-2": 4, "-3": 3}.get(str(layer), DEPTH)
    given = inputs | {"vision_feature_layer": layer}
    rows = make_references(model, "llava", inputs, method, depth)
    made, stats = answer(model, method, given)
    assert "18 of 48 tokens of its encoder" in stats.reference
    assert torch.equal(made, reference_answer(model, "llava", given, method, rows))


def test_several_images_of_a_row_in_one_tile_each() -> None:
    """LLaVA-OneVision cuts an image that is not alone in its row into no tiles."""
    model = shared_looking("llava_onevision", DEPTH)
    pixels, sizes = torch.randn(3, 5, 3, 16, 16), torch.tensor([[16, 32], [32, 32], [20, 9]])
    numbers = torch.tensor([2, 1])
    inputs: dict[str, Any] = {
        "pixel_values": pixels, "image_sizes": sizes, "batch_num_images": numbers,
    }  # fmt: skip
    with torch.no_grad():
        pooled = model.base_model.get_image_features(**inputs, return_dict=True).pooler_output
    counts = [len(features) for features in pooled]
    assert counts[:2] == [17, 17]
    rows = [[5, *[IMAGE] * 17, 6, *[IMAGE] * 17], [7, *[IMAGE] * counts[2], 8]]
    inputs |= left_padded(rows)
    made, stats = answer(model, ToMe(keep=0.5), inputs, seed=[3, 4])
    assert f"40 of {sum(counts)} visual tokens" in stats.reference  # of 5 tiles of 16
    alone = {"pixel_values": pixels[2:], "image_sizes": sizes[2:], "batch_num_images": numbers[1:]}
    alone |= {"input_ids": torch.tensor(rows[1:])}
    own, _ = answer(model, ToMe(keep=0.5), alone, seed=[4])
    assert torch.equal(own[0, -N_NEW:], made[1, -N_NEW:])


def test_features_with_the_class_token_all_stay() -> None:
    model = shared_looking("llava", DEPTH)
    inputs = draw_prompts("llava", model, (1,)) | {"vision_feature_select_strategy": "full"}
    ids = inputs["input_ids"]
    at = int((ids == IMAGE).nonzero()[0, 1])
    inputs["input_ids"] = torch.cat([ids[:, :at], ids[:, at : at + 1], ids[:, at:]], 1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    _, stats = answer(model, ToMe(keep=0.5), inputs)
    assert "8 of 16 tokens of its encoder (" in stats.reference


def test_several_answers_to_one_prompt() -> None:
    model = shared_looking("llava_next", DEPTH)
    inputs = draw_prompts("llava_next", model)
    several: dict[str, Any] = dict(do_sample=True, top_k=1, num_return_sequences=2)
    for method in (ToMe(keep=0.4), VisionZip(keep=0.4)):
        once, _ = answer(model, method, inputs)
        policy = mmaccel.Autoregressive()
        with mmaccel.attach(model, policy, strict=True, seed=5, visual_tokens=method) as run:
            made = model.generate(**inputs, **GREEDY | several)
        assert torch.equal(made, once.repeat_interleave(2, 0))
        kept = {row: [k.kept.tolist() for k in run.kept_tokens if k.row == row] for row in range(6)}
        assert len(kept[0]) == 2 and kept[0] == kept[1] and kept[4] == kept[5] != kept[0]
        total = sum(each.counts[1] for each in run.kept_tokens)
        assert f"{total} of 392 visual tokens" in run.stats.reference


def no_bias(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TowerRun, "bias", lambda self, dtype: torch.zeros_like(self.size))


def merge_the_class_token(patch: pytest.MonkeyPatch) -> None:
    begin = TowerRun.__post_init__

    def begin_without(self: Any) -> None:
        begin(self)
        self.is_patch = self.is_seen.clone()

    patch.setattr(TowerRun, "__post_init__", begin_without)


def forget_sizes(patch: pytest.MonkeyPatch) -> None:
    context = encoder.make_context
    patch.setattr(
        encoder,
        "make_context",
        lambda x, valid, **given: context(x, valid, **given | {"size": None}),
    )


def restore_from_another_level(patch: pytest.MonkeyPatch) -> None:
    restore = TowerRun.restore
    patch.setattr(TowerRun, "restore", lambda self, states, layer: restore(self, states, 99))


def represent_another_slot(patch: pytest.MonkeyPatch) -> None:
    own = encoder.find_targets
    patch.setattr(encoder, "find_targets", lambda plan: own(plan).roll(1, 1))


BUGS = (
    no_bias, merge_the_class_token, forget_sizes, restore_from_another_level,
    represent_another_slot,
)  # fmt: skip


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_seen(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_looking("llava", DEPTH)
    inputs, method = draw_prompts("llava", model), ToMe(keep=0.3)
    rows = make_references(model, "llava", inputs, method)
    plant(monkeypatch)
    try:
        made, _ = reduced_states(model, method, inputs)
    except (RuntimeError, ValueError, IndexError):
        return
    expected = [torch.stack(states) for states in zip(*(row.states for row in rows))]
    pairs = zip(made.hidden_states, expected)
    assert not all(a.shape == b.shape and torch.allclose(a, b, 2e-4, 2e-4) for a, b in pairs)
