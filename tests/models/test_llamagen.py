"""LlamaGen: the published names, full passes by hand, and every policy on it."""

from __future__ import annotations

import itertools
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.evaluation.exactness.g_test import count_sequences, g_test
from mmaccel.pipelines.loading.checkpoint import read_weights
from mmaccel.pipelines.models.llamagen.text_to_image import load_transformer
from mmaccel.pipelines.models.llamagen.token_model import LlamaGenWindow
from mmaccel.pipelines.models.llamagen.transformer import (
    LlamaGenConfig,
    LlamaGenTransformer,
    make_rotations,
    rotate,
)

CLASSES = LlamaGenConfig(32, 2, 4, vocab_size=12, block_size=16, num_classes=5)
CAPTIONS = LlamaGenConfig(32, 2, 4, vocab_size=12, block_size=16, cls_token_num=6, caption_dim=10)
LAYER = {  # c2i_B_256.pt, layer 0
    "attention.wqkv.weight": (2304, 768),
    "attention.wo.weight": (768, 768),
    "feed_forward.w1.weight": (2048, 768),
    "feed_forward.w3.weight": (2048, 768),
    "feed_forward.w2.weight": (768, 2048),
    "attention_norm.weight": (768,),
    "ffn_norm.weight": (768,),
}


def build(config: LlamaGenConfig, seed: int = 0) -> LlamaGenTransformer:
    torch.manual_seed(seed)
    model = LlamaGenTransformer(config).eval().requires_grad_(False)
    for name, tensor in model.state_dict().items():
        if "norm" not in name:
            tensor.normal_(std=0.4)
    return model


def sample(
    window: LlamaGenWindow, prompt: Prompt, policy: Any, seed: Any = 3, **options: Any
) -> mmaccel.Generation:
    noise = mmaccel.Noise.from_seed(seed, prompt.batch)
    return policy.sample(window, prompt, 16, params=mmaccel.SamplingParams(**options), noise=noise)


def test_names_and_shapes_are_those_of_the_published_transformers() -> None:
    with torch.device("meta"):
        base = LlamaGenTransformer(LlamaGenConfig(768, 12, 12)).state_dict()
        large = LlamaGenTransformer(
            LlamaGenConfig(1280, 1, 20, cls_token_num=120, caption_dim=2048, block_size=1024)
        ).state_dict()
    own = {name: tuple(tensor.shape) for name, tensor in base.items()}
    wanted = {f"layers.{k}.{name}": shape for k in range(12) for name, shape in LAYER.items()}
    wanted |= {
        "cls_embedding.embedding_table.weight": (1001, 768),
        "tok_embeddings.weight": (16384, 768),
        "norm.weight": (768,),
        "output.weight": (16384, 768),
    }
    assert own == wanted
    assert sum(math.prod(shape) for shape in own.values()) == 110_888_448  # "111 M"
    assert tuple(large["cls_embedding.cap_proj.fc1.weight"].shape) == (1280, 2048)
    assert tuple(large["cls_embedding.cap_proj.fc2.weight"].shape) == (1280, 1280)
    assert tuple(large["cls_embedding.uncond_embedding"].shape) == (120, 2048)
    assert tuple(large["layers.0.feed_forward.w1.weight"].shape) == (3584, 1280)


def test_a_pair_is_rotated_by_its_row_or_column() -> None:
    """Rotation as a product of complex numbers, for the token at row 2, column 3 of a grid of 4."""
    rotations = make_rotations(CLASSES)
    assert rotations.shape == (17, 4, 2) and not rotations[0].any()
    states = torch.randn(1, 1, 1, 8)
    rotated = rotate(states, rotations[None, None, 1 + 2 * 4 + 3][:, :, None])[0, 0, 0]
    for pair, (step, speed) in enumerate([(2, 1.0), (2, 0.01), (3, 1.0), (3, 0.01)]):
        number = complex(*states[0, 0, 0, 2 * pair : 2 * pair + 2].tolist())
        number *= complex(math.cos(step * speed), math.sin(step * speed))
        assert rotated[2 * pair : 2 * pair + 2].tolist() == pytest.approx(
            [number.real, number.imag], abs=1e-5
        )


class Masked:
    """A pass over whole rows under a mask, written plainly: no cache, no kernel.

    Args:
        allowed: `[R, N, N]` bool, or of every layer and head, `[L, R, H, N, N]`.
    """

    def __init__(self, n_layers: int, allowed: Tensor) -> None:
        self.stores, self._allowed = [self] * n_layers, allowed

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        allowed = self._allowed[:, None] if self._allowed.ndim == 3 else self._allowed[layer]
        scores = (query @ key.mT * given["scale"]).masked_fill(~allowed, -math.inf)
        return scores.softmax(-1) @ value


def full_logits(
    model: LlamaGenTransformer, first: Tensor, tokens: Tensor, seen: Tensor, hidden: Any = None
) -> Tensor:
    """Logits `[R, N, V]` of the tokens' slots in one pass without a cache, as published: texts are
    padded on the left.

    Args:
        first: `[R, T, dim]`, embedded conditions.
        seen: `[R, T]` bool, False on padding.
        hidden: `[L, R, H, N, N]` bool, what queries may not see beside that; None: nothing.
    """
    states = torch.cat([first, model.tok_embeddings(tokens[:, :-1])], 1)
    n_first, size = first.shape[1], states.shape[1]
    allowed = torch.ones(size, size).tril().bool()[None].repeat(len(tokens), 1, 1)
    allowed[:, :, :n_first] &= seen[:, None]
    allowed |= torch.eye(size).bool()
    if hidden is not None:
        allowed = allowed[:, None] & ~hidden
    rotations = make_rotations(model.config)[:size][None, None]
    states = model(states, rotations, Masked(len(model.layers), allowed))  # type: ignore[arg-type]
    return model.output(states[:, n_first - 1 :])


def open_classes(guided: bool) -> tuple[LlamaGenWindow, Prompt]:
    window = LlamaGenWindow(build(CLASSES))
    return window, window.condition(torch.tensor([1, 4, 0]), guided)


LENGTHS = torch.tensor([4, 6, 1])  # of texts


def draw_texts() -> Tensor:
    """Features `[3, 6, 10]`, padded on the right."""
    return torch.randn(3, 6, 10, generator=torch.Generator().manual_seed(5))


def open_text(guided: bool) -> tuple[LlamaGenWindow, Prompt]:
    window = LlamaGenWindow(build(CAPTIONS))
    return window, window.condition_on_text(draw_texts(), LENGTHS, guided)


def conditions(kind: str, model: LlamaGenTransformer, guided: bool) -> tuple[Tensor, Tensor]:
    """Embedded conditions `[R, T, dim]` as published, and which are no padding, `[R, T]`."""
    embedding: Any = model.cls_embedding
    if kind == "classes":
        rows = torch.tensor([1, 4, 0] + [CLASSES.num_classes] * 3 * guided)
        return embedding(rows), torch.ones(len(rows), 1, dtype=torch.bool)
    width = CAPTIONS.cls_token_num
    rows = [row.roll(width - n, 0) for row, n in zip(draw_texts(), LENGTHS.tolist())]
    rows += [embedding.uncond_embedding] * 3 * guided
    seen = torch.arange(width) >= width - LENGTHS[:, None]
    return embedding(torch.stack(rows)), seen.repeat(1 + guided, 1)


OPENERS = {"classes": open_classes, "text": open_text}


@pytest.mark.parametrize("kind", list(OPENERS))
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_greedy_tokens_follow_full_passes(kind: str, scale: float) -> None:
    window, prompt = OPENERS[kind](scale != 1)
    tokens = sample(window, prompt, mmaccel.Jacobi(5), temperature=0.0, guidance_scale=scale).tokens
    assert len(set(tokens.flatten().tolist())) > 5
    first, seen = conditions(kind, window.model, scale != 1)
    logits = full_logits(window.model, first, tokens.repeat(prompt.branches, 1), seen)
    if scale != 1:
        given, nothing = logits.chunk(2)
        logits = nothing + scale * (given - nothing)
    assert torch.equal(logits.argmax(-1), tokens)


@pytest.mark.parametrize("kind", list(OPENERS))
def test_policies_windows_and_batches_do_not_change_the_tokens(kind: str) -> None:
    window, prompt = OPENERS[kind](True)
    options: dict[str, Any] = dict(guidance_scale=2.0, top_k=8)
    plain = sample(window, prompt, mmaccel.Autoregressive(), [4, 5, 6], **options)
    for width in (2, 7, 40):
        made = sample(window, prompt, mmaccel.Jacobi(width), [4, 5, 6], **options)
        assert torch.equal(made.tokens, plain.tokens) and made.stats.passes <= plain.stats.passes
    if kind == "classes":
        alone = window.condition(torch.tensor([4]), True)
        made = sample(window, alone, mmaccel.Jacobi(6), [5], **options)
        assert torch.equal(made.tokens[0], plain.tokens[1])


def test_padding_of_a_text_may_hold_anything() -> None:
    """A query that sees it would be NaN, and NaN spreads through zero weights."""
    window, prompt = open_text(True)
    expected = sample(window, prompt, mmaccel.Jacobi(5)).tokens
    features = draw_texts()
    features[torch.arange(6) >= LENGTHS[:, None]] = math.nan
    prompt = window.condition_on_text(features, LENGTHS, True)
    assert torch.equal(sample(window, prompt, mmaccel.Jacobi(5)).tokens, expected)


@pytest.mark.parametrize("coupling", ["maximal", "gumbel"])
def test_samples_follow_the_models_own_distribution(coupling: Any) -> None:
    window, n_samples = LlamaGenWindow(build(CLASSES)), 5000
    prompt = window.condition(torch.full((n_samples,), 2), False)
    policy = mmaccel.SpeculativeJacobi(window=4, coupling=coupling)
    noise, params = mmaccel.Noise.from_seed(1, n_samples), mmaccel.SamplingParams()
    made = policy.sample(window, prompt, 2, params=params, noise=noise)
    sequences = torch.tensor(list(itertools.product(range(12), repeat=2)))
    first = window.model.cls_embedding(torch.full((144,), 2))
    seen = torch.ones(144, 1, dtype=torch.bool)
    probabilities = full_logits(window.model, first, sequences, seen).double().softmax(-1)
    probabilities = probabilities.gather(2, sequences[..., None])[..., 0].prod(1)
    test = g_test(count_sequences(made.tokens, 12), probabilities)
    assert test.p_value > 1e-4 and test.degrees > 20, test
    assert g_test(count_sequences(made.tokens.flip(1), 12), probabilities).p_value < 1e-4


def test_a_checkpoint_is_read_and_fitted(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = build(CAPTIONS)
    saved = {"model": model.state_dict(), "steps": torch.tensor(3), "args": Namespace(lr=1.0)}
    torch.save(saved, tmp_path / "t2i.pt")
    save_file(model.state_dict(), tmp_path / "t2i.safetensors")
    named = {"model": "GPT-B", "state_dict": model.state_dict()}  # a name is no wrapper
    torch.save(named, tmp_path / "named.pt")
    for name in ("t2i.pt", "t2i.safetensors", "named.pt"):
        again = load_transformer(read_weights(tmp_path / name), block_size=16, n_head=4)
        assert again.config == LlamaGenConfig(
            32, 2, 4, vocab_size=12, block_size=16, cls_token_num=6, caption_dim=10, num_classes=1
        )
        assert torch.equal(again.output.weight, model.output.weight)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    state = build(CLASSES).state_dict()
    with pytest.raises(OptionError, match="n_head: expected .* width 32"):
        load_transformer(state, block_size=16)
    with pytest.raises(OptionError, match="a square number, received 17"):
        load_transformer(state, block_size=17, n_head=4)
    with pytest.raises(UnsupportedModelError, match='Missing key.*: "norm.weight"'):
        load_transformer({k: v for k, v in state.items() if k != "norm.weight"}, n_head=4)
    with pytest.raises(UnsupportedModelError, match='Unexpected key.*: "rope"'):
        load_transformer(state | {"rope": torch.zeros(1)}, n_head=4)
    with pytest.raises(UnsupportedModelError, match="give the file of the transformer"):
        load_transformer({"quant_conv.weight": torch.zeros(1)})
    with pytest.raises(OptionError, match="expected a file"):
        read_weights(tmp_path / "none.pt")
    (tmp_path / "garbage.pt").write_bytes(b"no checkpoint")
    with pytest.raises(UnsupportedModelError, match="expected a checkpoint of tensors"):
        read_weights(tmp_path / "garbage.pt")
    torch.save([torch.zeros(1)], tmp_path / "list.pt")
    with pytest.raises(UnsupportedModelError, match="expected tensors by name"):
        read_weights(tmp_path / "list.pt")
    with pytest.raises(OptionError, match="heads whose width"):
        load_transformer(state, block_size=16, n_head=0)
    torch.save({"optimizer": {}}, tmp_path / "odd.pt")
    with pytest.raises(UnsupportedModelError, match="expected tensors by name"):
        read_weights(tmp_path / "odd.pt")


def test_more_positions_than_the_grid_has_are_refused() -> None:
    classes = LlamaGenWindow(build(CLASSES))
    classes.condition(torch.tensor([1]), False)
    with pytest.raises(OptionError, match="at most 17, received 18"):
        classes.reserve(1, 18)
