"""The window cache: keys are written at the cache indices of their rows, and nowhere else."""

from __future__ import annotations

import torch

from mmaccel.pipelines.hosts.layers.store import KVCacheLayout, WindowLayer, make_cache


def _states(rows: int, heads: int, width: int, size: int, base: float) -> torch.Tensor:
    """`[R, H, W, D]`, every number different."""
    n = rows * heads * width * size
    return base + torch.arange(n, dtype=torch.float32).view(rows, heads, width, size)


def test_a_transformers_cache_writes_to_the_right_layer_and_reports_the_visible_length() -> None:
    layout = KVCacheLayout(rows=1, max_length=9)
    cache = make_cache(2, layout)
    layout.prepare(torch.tensor([[1]]), visible_length=3)
    assert cache.get_seq_length() == 3 and cache.get_mask_sizes(1, 1) == (3, 0)
    assert cache.get_max_length() == 9
    keys = torch.full((1, 1, 1, 1), 8.0)
    cache.update(keys, keys, 1)
    assert cache.layers[0].keys is None
    keys = cache.layers[1].keys  # what the pass reads, and one index that nothing uses
    assert keys is not None and keys.flatten().tolist() == [0, 8, 0, 0]


def test_cache_indices_have_any_order_and_a_pass_may_have_fewer_rows() -> None:
    layout = KVCacheLayout(rows=3, max_length=4)
    layer = WindowLayer(layout)
    layout.prepare(torch.tensor([[2, 0], [1, 3], [0, 1]]), visible_length=4)
    before = layer.update(*(_states(3, 2, 2, 3, base) for base in (10.0, 500.0)))[0].clone()
    layout.prepare(torch.tensor([[3, 1]]), visible_length=4)
    keys = _states(1, 2, 2, 3, 90.0)
    seen, _ = layer.update(keys, keys)
    assert seen.shape == (1, 2, 4, 3)
    assert torch.equal(seen[0, :, [3, 1]], keys[0]) and torch.equal(seen[0, :, 2], before[0, :, 2])
    layout.prepare(torch.tensor([[2], [2], [2]]), visible_length=4)
    one = keys[:, :, :1].expand(3, -1, -1, -1)
    three, _ = layer.update(one, one)
    assert torch.equal(three[1:, :, [0, 1, 3]], before[1:, :, [0, 1, 3]])


def test_surplus_writes_go_to_the_last_index_of_their_own_row() -> None:
    layout = KVCacheLayout(rows=2, max_length=4)
    layer = WindowLayer(layout)
    layout.prepare(torch.tensor([[2, 3, 7], [0, 1, 3]]), visible_length=99)
    keys = _states(2, 1, 3, 1, 1.0)
    seen, _ = layer.update(keys, keys)
    assert seen[0, 0, :3, 0].tolist() == [0.0, 0.0, 1.0]
    assert seen[1, 0, :, 0].tolist() == [4.0, 5.0, 0.0, 6.0]


def test_what_a_head_reads_of_a_row_stands_together_whatever_the_store_has_done() -> None:
    layout = KVCacheLayout(rows=3, max_length=9)
    layer = WindowLayer(layout)

    def check() -> None:
        for seen in layer.visible():
            assert seen.shape[2] > 1 and seen.stride()[2:] == (4, 1)

    states = _states(3, 2, 3, 4, 1.0)
    layout.prepare(torch.tensor([[0, 1, 2]] * 3), visible_length=3)
    layer.update(states, states)
    check()
    layout.prepare(torch.tensor([[3]] * 3), visible_length=9)  # it has grown
    layer.update(states[:, :, :1], states[:, :, :1])
    check()
    layer.keep(torch.tensor([2, 0]))
    layout.keep(torch.tensor([2, 0]))
    layout.prepare(torch.tensor([[4]] * 2), visible_length=5)
    check()
    assert torch.equal(layer.visible()[0][:, :, :3], states[[2, 0]])
    shorter = layout.shorten(torch.tensor([2, 2]))
    layer.evict(torch.tensor([[[0, 2]], [[1, 2]]]), shorter)
    shorter.prepare(torch.tensor([[2]] * 2), visible_length=3)
    check()
    expected = torch.stack([states[2][:, [0, 2]], states[0][:, [1, 2]]])
    assert torch.equal(layer.visible()[1][:, :, :2], expected)
