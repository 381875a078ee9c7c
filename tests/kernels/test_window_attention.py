"""The specification of window attention against torch's own attention and against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mmaccel import ShapeError
from mmaccel.kernels.window_attention import Blocks, Grid, window_attention

STARTS = [0, 11, 27]
ROWS, HEADS, GROUP, WIDTH, CAPACITY, HEAD = 3, 2, 2, 5, 32, 8


def draw(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(ROWS, HEADS * GROUP, WIDTH, HEAD, generator=generator, dtype=dtype)
    k = torch.randn(ROWS, CAPACITY, HEADS, HEAD, generator=generator, dtype=dtype).transpose(1, 2)
    v = torch.randn(ROWS, CAPACITY, HEADS, 6, generator=generator, dtype=dtype).transpose(1, 2)
    return q, k, v, torch.tensor(STARTS)


def sees(row: int, head: int, w: int, n: int, rules: dict[str, object]) -> bool:
    """Whether query w of a row sees position n under a key head: the rules one by one."""
    position = STARTS[row] + w
    if n > position:
        return False
    for name, rule in rules.items():
        if name == "window" and n <= position - rule:  # type: ignore[operator]
            return False
        if name == "tree" and n >= STARTS[row]:
            bits = rule[row] if rule.ndim == 3 else rule  # type: ignore[index, attr-defined]
            if not bits[w][n - STARTS[row]]:
                return False
        if isinstance(rule, Blocks):
            listed = rule.index[row, head].tolist()[: int(rule.count[row, head])]
            if n // rule.size not in listed:
                return False
        if isinstance(rule, Grid) and n >= int(rule.text[row]):
            text = int(rule.text[row])
            place = {n: divmod(n - text, rule.columns) for n in (n, position)}
            (row_n, column_n), (row_q, column_q) = place[n], place[position]
            if max(abs(row_n - row_q), abs(column_n - column_q)) > rule.radius:
                return False
    return True


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, rules: dict[str, object]
) -> tuple[Tensor, Tensor]:
    """One query and one key at a time, in Python's floats."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    for row in range(ROWS):
        for head in range(HEADS * GROUP):
            for w in range(WIDTH):
                scores = {}
                for n in range(CAPACITY):
                    if sees(row, head // GROUP, w, n, rules):
                        dot = float(q[row, head, w] @ k[row, head // GROUP, n]) * scale
                        scores[n] = softcap * math.tanh(dot / softcap) if softcap else dot
                if scores:
                    lse[row, head, w] = math.log(sum(map(math.exp, scores.values())))
                for n, value in scores.items():
                    weight = math.exp(value - float(lse[row, head, w]))
                    out[row, head, w] += weight * v[row, head // GROUP, n]
    return out, lse


def lists() -> Blocks:
    index = torch.tensor([[[0, 1, -1], [5, 9, 3]], [[2, 0, 1], [1, -1, 2]], [[7, 0, 3], [6, 7, 0]]])
    count = torch.tensor([[2, 3], [2, 3], [3, 1]])
    return Blocks(index.to(torch.int32), count.to(torch.int32), 4)


def bits(rows: int) -> Tensor:
    return torch.rand(rows, WIDTH, WIDTH, generator=torch.Generator().manual_seed(rows)) < 0.5


RULES: dict[str, dict[str, object]] = {
    "causal tail": {},
    "sliding window of 1": {"window": 1},
    "sliding window of 6": {"window": 6},
    "one tree": {"tree": bits(1)[0]},
    "a tree a row": {"tree": bits(3)},
    "blocks": {"blocks": lists()},
    "grid": {"grid": Grid(torch.tensor([0, 3, 6]), 5, 1)},
    "all": {
        "window": 20,
        "tree": bits(3),
        "blocks": lists(),
        "grid": Grid(torch.tensor([0, 3, 6]), 5, 2),
    },
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_equals_plain_loops(rules: dict[str, object], softcap: float | None) -> None:
    q, k, v, start = draw()
    expected, expected_lse = by_hand(q, k, v, 0.4, softcap, rules)
    out, lse = window_attention(q, k, v, start, scale=0.4, softcap=softcap, lse=True, **rules)  # type: ignore[call-overload]
    torch.testing.assert_close(out, expected, atol=3e-6, rtol=3e-6)  # computed in float32
    torch.testing.assert_close(lse.double(), expected_lse, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.float16, 1e-3),
                                              (torch.bfloat16, 8e-3)])  # fmt: skip
def test_equals_torchs_attention(dtype: torch.dtype, tolerance: float) -> None:
    """Half types: the result is rounded once, by half a unit of numbers below 4."""
    q, k, v, start = draw(dtype)
    n = torch.arange(CAPACITY)
    mask = n <= start[:, None, None, None] + torch.arange(WIDTH)[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), attn_mask=mask, scale=0.3, enable_gqa=True
    )
    out, lse = window_attention(q, k, v, start, scale=0.3, lse=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)
    scores = q.float() @ k.float().repeat_interleave(GROUP, 1).mT * 0.3
    expected_lse = torch.logsumexp(scores.masked_fill(~mask, -math.inf), -1)
    torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=2e-6)


def test_a_trees_branches_are_causal_runs() -> None:
    """Two branches 0-1-3 and 0-2-4 in one window are what each gives in a run of its own."""
    q, k, v, start = draw(torch.float32)
    q = q[:1]
    k, v, start = k[:1], v[:1], start[1:2]
    branches = [[0, 1, 3], [0, 2, 4]]
    tree = torch.zeros(WIDTH, WIDTH, dtype=torch.bool)
    for branch in branches:
        for depth, w in enumerate(branch):
            tree[w, branch[: depth + 1]] = True
    out = window_attention(q, k, v, start, scale=0.4, tree=tree)
    for branch in branches:
        order = torch.tensor([*range(STARTS[1]), *(STARTS[1] + w for w in branch)])
        alone = window_attention(q[:, :, branch], k[:, :, order], v[:, :, order], start, scale=0.4)
        torch.testing.assert_close(out[:, :, branch], alone, atol=2e-6, rtol=2e-6)


def test_what_no_query_sees_may_be_anything() -> None:
    q, k, v, start = draw(torch.float32)
    expected = window_attention(q, k, v, start, scale=0.4)
    for row, first in enumerate(STARTS):
        k[row, :, first + WIDTH :] = v[row, :, first + WIDTH :] = math.nan
    assert torch.equal(window_attention(q, k, v, start, scale=0.4), expected)


def test_nothing_seen_gives_zeros() -> None:
    q, k, v, _ = draw(torch.float32)
    out, lse = window_attention(q, k, v, torch.tensor([-5, -2, 0]), scale=0.4, lse=True)
    assert not out[0].any() and not out[1, :, :2].any() and out[1:, :, 2:].all()
    assert lse[0].eq(-math.inf).all() and lse[1, :, :2].eq(-math.inf).all()
    assert lse[1:, :, 2:].isfinite().all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v, start = draw()
    bad_tree, bad_text = torch.ones(4, 4).bool(), Grid(torch.zeros(2).long(), 4, 1)
    for name, call in {
        "keys": lambda: window_attention(q, k[:2], v, start, scale=1.0),
        "values": lambda: window_attention(q, k, v[:, :, 1:], start, scale=1.0),
        "start": lambda: window_attention(q, k, v, start[:2], scale=1.0),
        "tree": lambda: window_attention(q, k, v, start, scale=1.0, tree=bad_tree),
        "text": lambda: window_attention(q, k, v, start, scale=1.0, grid=bad_text),
        "multiple of 2": lambda: window_attention(q[:, :3], k, v, start, scale=1.0),
    }.items():
        with pytest.raises(ShapeError, match=name):
            call()
    for part in (Blocks(lists().index[:2], lists().count, 4), Blocks(lists().index, start, 4)):
        with pytest.raises(ShapeError, match="of blocks"):
            window_attention(q, k, v, start, scale=1.0, blocks=part)
