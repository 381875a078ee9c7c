"""The specifications of `add_norm`, `rope_write` and `gated_act` against formulas by hand."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel import ShapeError
from mmaccel.kernels.add_norm import add_norm
from mmaccel.kernels.gated_act import Activation, gated_act
from mmaccel.kernels.norm import HeadNorms, Norm, NormKind
from mmaccel.kernels.rope_write import rope_write, sign_sine

GENERATOR = torch.Generator().manual_seed(2)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=dtype) + 0.3


def test_rms_norm_of_a_sum() -> None:
    hidden, update, weight = draw(3, 7), draw(3, 7), draw(7)
    total, normed = add_norm(hidden, update, Norm(weight, None, "rms", 1.0, 0.1), scale=0.5)
    for row in range(3):
        numbers = [float(h) + 0.5 * float(u) for h, u in zip(hidden[row], update[row])]
        root = math.sqrt(sum(x * x for x in numbers) / 7 + 0.1)
        assert total[row].tolist() == pytest.approx(numbers)
        by_hand = [x / root * (1 + float(w)) for x, w in zip(numbers, weight)]
        assert normed[row].tolist() == pytest.approx(by_hand, rel=1e-12)


def by_hand(x: Tensor, weight: Tensor | float, bias: Tensor | float, norm: Any) -> Tensor:
    """A norm of the last axis as its formula."""
    centred = x - x.mean(-1, keepdim=True) if norm.kind == "layer" else x
    root = (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return centred / root * (weight + norm.offset) + bias


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_of_the_update_comes_before_the_sum(kind: NormKind, offset: float) -> None:
    hidden, update = draw(4, 6), draw(4, 6)
    weights = [draw(6) for _ in range(4)]
    post, norm = Norm(*weights[:2], kind, offset, 1e-3), Norm(*weights[2:], kind, offset, 0.1)
    total, normed = add_norm(hidden, update, norm, post=post, scale=0.5)
    expected = hidden + 0.5 * by_hand(update, *weights[:2], post)
    close = {"atol": 1e-6, "rtol": 1e-6}
    torch.testing.assert_close(total, expected, **close)
    torch.testing.assert_close(normed, by_hand(expected, *weights[2:], norm), **close)
    total, again = add_norm(hidden, update, None, post=post)
    assert again is total
    torch.testing.assert_close(total, hidden + by_hand(update, *weights[:2], post), **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_keep_their_dtype_and_are_computed_in_float32(dtype: torch.dtype) -> None:
    """A norm of the update is rounded to the dtype before it is added."""
    hidden, update = (draw(5, 64, dtype=torch.float32).to(dtype) for _ in range(2))
    weight, post = draw(64).to(dtype), draw(64).to(dtype)
    total, normed = add_norm(hidden, update, Norm(weight), post=Norm(post))
    added = F.rms_norm(update.float(), (64,), post.float(), 1e-6).to(dtype)
    expected = F.rms_norm((hidden + added).float(), (64,), weight.float(), 1e-6).to(dtype)
    assert normed.dtype == total.dtype == dtype
    torch.testing.assert_close(total, hidden + added)
    torch.testing.assert_close(normed, expected)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("form", ["one for all", "one each", "over all"])
@pytest.mark.parametrize(("kind", "offset"), [("rms", 0.0), ("rms", 1.0), ("layer", 0.0)])
def test_norms_of_heads_come_before_the_rotation(
    kind: NormKind, offset: float, form: str, grouped: bool
) -> None:
    """What is rotated and written is the norm of queries and of keys, each with its own weight."""
    n_tokens, heads, kv_heads, width = 3, 4, 2, 6
    qkv, angles = draw(n_tokens, (heads + 2 * kv_heads) * width), draw(n_tokens, 4)
    parts = qkv.view(n_tokens, -1, width).split([heads, kv_heads, kv_heads], 1)
    given, expected = [], []
    for part in parts[:2]:
        n = part.shape[1]
        shape = {"one for all": (width,), "one each": (n, width), "over all": (n * width,)}[form]
        weight, bias = draw(*shape), draw(*shape)
        given.append((weight, bias))
        norm = Norm(weight, bias, kind, offset, 0.01)
        states = part.flatten(1) if form == "over all" else part
        expected.append(by_hand(states, weight, bias, norm).view(part.shape))
    (q_weight, q_bias), (k_weight, k_bias) = given
    norms = HeadNorms(q_weight, k_weight, q_bias, k_bias, kind, offset, 0.01)
    pair, index, found = (angles.cos(), sign_sine(angles.sin(), False)), torch.arange(3), []
    if grouped:
        by_key = [parts[0].unflatten(1, (kv_heads, -1)), parts[1][:, :, None], parts[2][:, :, None]]
        qkv = torch.cat(by_key, 2).flatten(1)
    before = qkv.clone()
    plain = torch.cat([*expected, parts[2]], 1).flatten(1)
    for packed, options in ((qkv, dict[str, Any](norms=norms, grouped=grouped)), (plain, {})):
        stores = [torch.zeros(3, kv_heads, width, dtype=torch.float64) for _ in range(2)]
        found.append((rope_write(packed, *pair, *stores, index, **options), *stores))
    for received, wanted in zip(*found):
        torch.testing.assert_close(received, wanted, atol=1e-6, rtol=1e-6)
    assert qkv.equal(before)


def test_norms_of_heads_are_rounded_before_the_rotation() -> None:
    qkv, angles = draw(3, 24).bfloat16(), draw(3, 4).bfloat16()
    stores = [torch.zeros(3, 2, 4).bfloat16() for _ in range(2)]
    norms = HeadNorms(draw(4).bfloat16(), draw(4).bfloat16())
    queries = rope_write(qkv, angles, -angles, *stores, torch.arange(3), norms=norms)
    heads = qkv.view(3, 6, 4)
    normed = [
        add_norm(part.flatten(0, 1), None, Norm(weight))[1].view(part.shape)
        for part, weight in ((heads[:, :2], norms.q_weight), (heads[:, 2:4], norms.k_weight))
    ]
    for received, part in zip((queries, stores[0]), normed):
        wanted = (part * angles[:, None]).addcmul_(part.roll(2, -1), -angles[:, None])
        assert received.equal(wanted)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_of_a_part_of_each_head_and_the_write(interleaved: bool) -> None:
    """Two numbers turn as a complex one; the fifth of a head stays as it is."""
    n_tokens, heads, kv_heads, width = 3, 4, 2, 5
    qkv, angles = draw(n_tokens, (heads + 2 * kv_heads) * width), draw(n_tokens, 2)
    pairs = [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]
    whole = torch.empty(n_tokens, 4, dtype=torch.float64)
    for k, pair in enumerate(pairs):
        whole[:, list(pair)] = angles[:, k : k + 1]
    keys, values = (torch.zeros(6, kv_heads, width, dtype=torch.float64) for _ in range(2))
    index = torch.tensor([4, 0, 3])
    queries = rope_write(
        qkv, whole.cos(), sign_sine(whole.sin(), interleaved), keys, values, index,
        interleaved=interleaved,
    )  # fmt: skip
    expected = qkv.view(n_tokens, -1, width).clone()
    for token in range(n_tokens):
        for head in range(heads + kv_heads):
            for k, (a, b) in enumerate(pairs):
                angle, x = float(angles[token, k]), expected[token, head]
                turned = complex(x[a], x[b]) * complex(math.cos(angle), math.sin(angle))
                x[a], x[b] = turned.real, turned.imag
    torch.testing.assert_close(queries, expected[:, :heads])
    torch.testing.assert_close(keys[index], expected[:, heads : heads + kv_heads])
    assert values[index].equal(expected[:, heads + kv_heads :])
    assert not keys[[1, 2, 5]].any() and not values[[1, 2, 5]].any()


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2)])
@pytest.mark.parametrize("n_turned", [0, 2, 6])
def test_heads_in_groups(heads: int, kv_heads: int, n_turned: int) -> None:
    """The same numbers, ordered by key head, give the same queries, keys and values."""
    n_tokens, width, group = 5, 6, heads // kv_heads
    qkv, angles = draw(n_tokens, (heads + 2 * kv_heads) * width), draw(n_tokens, n_turned)
    pair = (angles.cos(), angles.sin()) if n_turned else (None, None)
    parts = qkv.view(n_tokens, -1, width).split([heads, kv_heads, kv_heads], 1)
    grouped = torch.cat(
        [parts[0].unflatten(1, (kv_heads, group)), parts[1][:, :, None], parts[2][:, :, None]], 2
    ).flatten(1)
    index, found = torch.tensor([4, 0, 3, 6, 1]), []
    for given, is_grouped in ((qkv, False), (grouped, True)):
        stores = [torch.zeros(7, kv_heads, width, dtype=torch.float64) for _ in range(2)]
        queries = rope_write(given, *pair, *stores, index, grouped=is_grouped)
        found.append((queries, *stores))
    assert all(map(torch.equal, *found))


def test_without_angles_nothing_turns() -> None:
    qkv, store = draw(2, 12), torch.zeros(3, 1, 4, dtype=torch.float64)
    queries = rope_write(qkv, None, None, store, store.clone(), torch.tensor([2, 0]))
    assert queries.flatten(1).equal(qkv[:, :4]) and store[2, 0].equal(qkv[0, 4:8])


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_the_gate_comes_first(kind: Activation) -> None:
    packed = draw(3, 10)
    gate, up = packed[:, :5], packed[:, 5:]
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    acted = {
        "silu": gate / (1 + (-gate).exp()),
        "gelu": gate * (1 + (gate / math.sqrt(2)).erf()) / 2,
        "gelu_tanh": gate * (1 + inner.tanh()) / 2,
    }
    torch.testing.assert_close(gated_act(packed, kind), acted[kind] * up)


STORES = draw(3, 1, 4), draw(3, 1, 4), torch.arange(2)
BAD: list[tuple[Any, tuple[Any, ...], str]] = [
    (add_norm, (draw(2, 4), draw(2, 3), None), "update"),
    (add_norm, (draw(2, 4), None, Norm(draw(3))), "weight"),
    (add_norm, (draw(2, 4), None, Norm(None, draw(3))), "weight"),
    (partial(add_norm, post=Norm(draw(2, 4))), (draw(2, 4), draw(2, 4), None), "weight"),
    (gated_act, (draw(2, 3),), "even"),
    (rope_write, (draw(2, 8), None, None, draw(3, 1, 4), draw(3, 1, 4), torch.arange(2)), "packed"),
    (rope_write, (draw(2, 12), None, None, draw(3, 1, 4), draw(3, 1, 4), torch.arange(3)), "index"),
    (
        rope_write,
        (draw(2, 12), draw(2, 6), None, draw(3, 1, 4), draw(3, 1, 4), torch.arange(2)),
        "angles",
    ),
    *(
        (partial(rope_write, norms=norms), (draw(2, 16), None, None, *STORES), words)
        for norms, words in (
            (HeadNorms(draw(5), None), "queries"),
            (HeadNorms(None, draw(2, 4)), "keys"),
            (HeadNorms(draw(8), draw(1, 4)), "keys"),
            (HeadNorms(draw(2, 4), draw(4)), "keys"),
            (HeadNorms(draw(4), draw(4), draw(8)), "queries"),
            (HeadNorms(draw(4), draw(4), None, draw(1)), "keys"),
        )
    ),
]


@pytest.mark.parametrize(("function", "args", "words"), BAD)
def test_shapes_that_do_not_fit_are_refused(function: Any, args: Any, words: str) -> None:
    with pytest.raises(ShapeError, match="indices" if words == "index" else words):
        function(*args)
