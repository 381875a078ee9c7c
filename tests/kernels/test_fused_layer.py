"""The specifications of `add_norm`, `rope_write` and `gated_act` against formulas by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel import ShapeError
from mmaccel.kernels.add_norm import add_norm
from mmaccel.kernels.gated_act import Activation, gated_act
from mmaccel.kernels.rope_write import rope_write, sign_sine

GENERATOR = torch.Generator().manual_seed(2)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=dtype) + 0.3


def test_rms_norm_of_a_sum() -> None:
    hidden, update, weight = draw(3, 7), draw(3, 7), draw(7)
    total, normed = add_norm(hidden, update, weight, eps=0.1, offset=1.0, scale=0.5)
    for row in range(3):
        numbers = [float(h) + 0.5 * float(u) for h, u in zip(hidden[row], update[row])]
        root = math.sqrt(sum(x * x for x in numbers) / 7 + 0.1)
        assert total[row].tolist() == pytest.approx(numbers)
        by_hand = [x / root * (1 + float(w)) for x, w in zip(numbers, weight)]
        assert normed[row].tolist() == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("is_by_head", [False, True])
def test_layer_norm_with_weights_of_heads(is_by_head: bool) -> None:
    hidden = draw(4, 3, 6)
    shape = (3, 6) if is_by_head else (6,)
    weight, bias = draw(*shape), draw(*shape)
    total, normed = add_norm(hidden, None, weight, bias, kind="layer", eps=1e-3)
    assert total is hidden
    expected = F.layer_norm(hidden, (6,), eps=1e-3) * weight + bias
    torch.testing.assert_close(normed, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_keep_their_dtype_and_are_computed_in_float32(dtype: torch.dtype) -> None:
    hidden, weight = draw(5, 64, dtype=torch.float32).to(dtype), draw(64).to(dtype)
    normed = add_norm(hidden, None, weight)[1]
    expected = F.rms_norm(hidden.float(), (64,), weight.float(), 1e-6).to(dtype)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed, expected)


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


BAD: list[tuple[Any, tuple[Any, ...], str]] = [
    (add_norm, (draw(2, 4), draw(2, 3), None), "update"),
    (add_norm, (draw(2, 4), None, draw(3)), "weight"),
    (gated_act, (draw(2, 3),), "even"),
    (rope_write, (draw(2, 8), None, None, draw(3, 1, 4), draw(3, 1, 4), torch.arange(2)), "packed"),
    (rope_write, (draw(2, 12), None, None, draw(3, 1, 4), draw(3, 1, 4), torch.arange(3)), "index"),
    (
        rope_write,
        (draw(2, 12), draw(2, 6), None, draw(3, 1, 4), draw(3, 1, 4), torch.arange(2)),
        "angles",
    ),
]


@pytest.mark.parametrize(("function", "args", "words"), BAD)
def test_shapes_that_do_not_fit_are_refused(function: Any, args: Any, words: str) -> None:
    with pytest.raises(ShapeError, match="indices" if words == "index" else words):
        function(*args)
