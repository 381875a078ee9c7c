"""Codebook patterns: the inverse of random tables, and each library's own arrangement."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.tokenizers_vq.delay import (
    apply,
    coarse_then_fine,
    delay,
    find_frames,
    flat,
    has_code,
    invert,
    list_cells,
    stack_and_delay,
)

CODES = 50
BEGIN = 60
END = 61
DIA = (0, 8, 9, 10, 11, 12, 13, 14, 15)


def draw(n_frames: int, n_books: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CODES, (2, n_frames, n_books), generator=generator)


def draw_table(seed: int) -> Tensor:
    """Any steps, each once in a book, with steps that hold nothing between them."""
    generator = torch.Generator().manual_seed(seed)
    n_frames, n_books = torch.randint(1, 9, (2,), generator=generator).tolist()
    columns = [torch.randperm(2 * n_frames, generator=generator)[:n_frames] for _ in range(n_books)]
    return torch.stack(columns, 1)


TABLES = {
    "flat": flat(4, 3),
    "parallel": delay(5, (0, 0, 0)),
    "delay": delay(5, (1, 2, 3)),
    "delays of each book": delay(3, DIA),
    "stack and delay": stack_and_delay(3, (0, 2, 4, 1, 3), 2),
    "coarse then fine": coarse_then_fine(4, (0, 1, 2)),
    **{f"random {seed}": draw_table(seed) for seed in range(60)},
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
def test_the_inverse_is_the_identity(table: Tensor) -> None:
    codes = draw(*table.shape)
    grid = apply(codes, table, BEGIN, END)
    assert torch.equal(invert(grid, table), codes)
    valid = has_code(table)
    assert int(valid.sum()) == table.numel()
    assert torch.equal(grid < CODES, valid.expand_as(grid))
    frames = find_frames(table)
    cells = list_cells(valid)
    assert torch.equal(table[frames[cells.step, cells.book], cells.book], cells.step)
    assert bool((cells.step.diff() >= 0).all())
    behind = grid[0] == END
    assert bool((behind.long().diff(dim=0) >= 0).all())  # nothing comes behind the end


def test_the_patterns_by_hand() -> None:
    assert flat(2, 2).tolist() == [[0, 1], [2, 3]]
    assert delay(2, (0, 3)).tolist() == [[0, 3], [1, 4]]
    assert coarse_then_fine(3, (0, 1)).tolist() == [[0, 3, 4], [1, 4, 5], [2, 5, 6]]
    assert stack_and_delay(2, (0, 2, 1), 1).tolist() == [[0, 1], [2, 3], [1, 2]]
    codes = torch.tensor([[[1, 2], [3, 4]]])
    assert apply(codes, delay(2, (0, 1)), 8, 9).tolist() == [[[1, 8], [3, 2], [9, 4]]]
    assert apply(codes, flat(2, 2), 8).tolist() == [[[1, 8], [8, 2], [3, 8], [8, 4]]]


def test_books_or_delays_that_are_wrong_are_seen() -> None:
    codes = draw(6, 4)
    table = delay(6, (1, 2, 3, 4))
    grid = apply(codes, table, BEGIN)
    assert not torch.equal(invert(grid.roll(1, 2), table), codes)  # off by one book
    twice = torch.cat([grid, grid.new_full((2, 4, 4), BEGIN)], 1)
    twice = torch.stack([twice[:, :, k].roll(k + 1, 1) for k in range(4)], 2)
    assert not torch.equal(invert(twice, table), codes)


@pytest.mark.parametrize("channels", [1, 2])
def test_as_musicgen_arranges(channels: int) -> None:
    from transformers.models.musicgen.modeling_musicgen import MusicgenForCausalLM as Musicgen

    n_books = 4
    config = SimpleNamespace(audio_channels=channels)
    model: Any = SimpleNamespace(num_codebooks=n_books, config=config)
    delays = [1 + book // channels for book in range(n_books)]
    for n_frames in (1, 3, 9):
        codes = draw(n_frames, n_books)
        table = delay(n_frames, delays)
        n_steps = int(table.max()) + 1
        if n_steps < 2 * n_books // channels - 1:
            continue
        start = torch.full((2 * n_books, 1), BEGIN)
        _, free = Musicgen.build_delay_pattern_mask(model, start, BEGIN, n_steps)
        assert torch.equal((free == -1).view(2, n_books, -1)[0].T, has_code(table))
        own = torch.cat([start, codes.mT.reshape(2 * n_books, -1)], 1)
        _, arranged = Musicgen.build_delay_pattern_mask(model, own, BEGIN, n_steps)
        grid = apply(codes, table, BEGIN)
        assert torch.equal(arranged.view(2, n_books, -1).mT, grid)
        ids = torch.where(grid == BEGIN, 0, grid).mT.reshape(2 * n_books, -1)
        assert torch.equal(Musicgen.apply_delay_pattern_mask(ids, free), arranged)


def test_as_dia_arranges() -> None:
    from transformers.models.dia.processing_dia import DiaProcessor as Dia

    for n_frames in (1, 4, 20):
        codes = draw(n_frames, len(DIA))
        codes[:, 0] = BEGIN
        table = delay(n_frames, DIA)
        n_steps = n_frames + max(DIA)
        padded = torch.cat([codes, torch.full((2, max(DIA), len(DIA)), END)], 1)

        def arrange(grid: Tensor, revert: bool, n_steps: int = n_steps) -> Tensor:
            places = Dia.build_indices(2, n_steps, len(DIA), list(DIA), revert)
            return Dia.apply_audio_delay(grid, END, BEGIN, places)

        grid = apply(codes, table, BEGIN, END)
        assert torch.equal(arrange(padded, False), grid)
        assert torch.equal(arrange(grid, True)[:, :n_frames], invert(grid, table))


def test_as_higgs_arranges() -> None:
    from transformers.models.higgs_audio_v2.processing_higgs_audio_v2 import (
        HiggsAudioV2Processor as Higgs,
    )

    ids: Any = SimpleNamespace(audio_stream_bos_id=BEGIN, audio_stream_eos_id=END)
    for n_frames in (3, 8):
        codes = draw(n_frames, 4)
        codes[:, 0] = BEGIN
        codes[:, -1] = END
        table = delay(n_frames, range(4))
        grid = apply(codes, table, BEGIN, END)
        assert torch.equal(Higgs.build_delay_pattern(ids, codes.mT).mT, grid)
        for row in range(2):
            assert torch.equal(Higgs.revert_delay_pattern(ids, grid[row]), codes[row])


def test_as_parler_is_published() -> None:
    """Begin ids up to book k's step k, end ids in its last K - 1 - k of S steps."""
    n_books, n_steps = 3, 8
    codes = draw(n_steps - n_books, n_books)
    grid = apply(codes, delay(n_steps - n_books, (1, 2, 3)), BEGIN, END)
    assert grid.shape[1] == n_steps
    step = torch.arange(n_steps)[:, None]
    book = torch.arange(n_books)
    assert torch.equal(grid[0] == BEGIN, step <= book)
    assert torch.equal(grid[0] == END, step - book > n_steps - n_books)
