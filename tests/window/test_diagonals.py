"""FlashAR: tokens by full passes by hand, its passes, its published layout, and planted bugs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mmaccel import CausalLMWindow, ContinuousBatching, FlashAR, Grid, Noise
from mmaccel.errors import MMAccelError
from mmaccel.samplers.window.diagonals import Picture
from tests.fixtures.tiny_lms import VOCAB, build_lm
from tests.fixtures.toy_models import sample

START, DEPTH, WIDTH = 1, 3, 32
GRIDS = {
    "plain": Grid(3, 4, VOCAB),
    "row ends": Grid(4, 2, VOCAB, tokens=(4, 30), row_end=39, image_end=38),
    "a column": Grid(4, 1, VOCAB),
    "a row": Grid(1, 4, VOCAB),
}
ROWS = [[5, 6, 7], [9], [4, 8, 8, 2, 6]]
OTHERS = [[7], [3, 3, 2], [11, 5]]
GUIDED = {"guidance_scale": 1.7, "temperature": 0.8}


def build() -> Any:
    """Emu3.5's layers are Qwen3's."""
    return build_lm("qwen3", num_hidden_layers=DEPTH, num_key_value_heads=2)


def published(model: Any, n_layers: int) -> dict[str, Tensor]:
    """Random weights of a whole checkpoint, named and shaped as by the authors' code."""
    torch.manual_seed(5)
    of_head = {
        "horizontal_head.weight": model.lm_head.weight.detach().clone(),
        "vertical_head.weight": torch.randn(VOCAB, WIDTH) / 4,
        "hv_gate_mlp.0.weight": torch.randn(64, 2 * WIDTH) / 2,
        "hv_gate_mlp.2.weight": torch.randn(1, 64),
        "hv_gate_mlp.2.bias": torch.randn(1),
        "hv_gate_corner.weight": torch.randn(1, WIDTH) / 8,
        "hv_gate_corner.bias": torch.randn(1),
    }
    if n_layers:
        of_head["vertical_norm.weight"] = torch.rand(WIDTH) + 0.5
    of_layers = {
        f"vertical_block.{layer}.{name}": torch.randn_like(value) / value.ndim**2
        for layer in range(n_layers)
        for name, value in model.model.layers[START].state_dict().items()
    }
    backbone = {f"backbone.{name}": value for name, value in model.model.state_dict().items()}
    return backbone | of_head | of_layers


def write(folder: Path, model: Any, n_layers: int = 2, **changes: Any) -> str:
    """A checkpoint in the authors' layout."""
    save_file(published(model, n_layers), folder / "model.safetensors")
    names = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim rms_norm_eps"
    )
    inner = {name: getattr(model.config, name) for name in names.split()}
    content = {
        "model_type": "emu3_flashar", "vocab_size": VOCAB, "hidden_size": WIDTH,
        "use_vertical_block": n_layers > 0, "vertical_layers": n_layers,
        "vertical_start_layer": START if n_layers else DEPTH,
        "backbone_config": inner | {"rope_theta": 10000.0},
    } | changes  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return str(folder)


@torch.no_grad()
def logits_by_hand(model: Any, n_layers: int, prompt: list[int], cells: Tensor, m: int) -> Any:
    """Logits of each cell, of one pass over the prompt and all cells `[S]` under one mask, in which
    those of later diagonals do not count.
    """
    tensors, n = published(model, n_layers), len(prompt)
    number = torch.arange(len(cells))
    step = torch.cat([torch.arange(-n, 0), number // m + number % m])
    mask = torch.where(step[None] <= step[:, None], 0.0, -torch.inf)[None, None]
    ids = torch.cat([torch.tensor(prompt), cells])[None]
    line = torch.arange(len(step))[None]
    found = model.model(
        input_ids=ids, attention_mask=mask, position_ids=line, output_hidden_states=True
    )
    h = found.last_hidden_state[0]
    x = found.hidden_states[START][0] if n_layers else h
    v = x.clone()
    if n_layers:
        below, angles = x[None, n:], model.model.rotary_emb(x, line[:, n:])
        for layer in range(n_layers):
            copied = copy.deepcopy(model.model.layers[START])
            start = f"vertical_block.{layer}."
            own = {k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)}
            copied.load_state_dict(own)
            below = copied(
                below, attention_mask=mask[..., n:, n:], position_embeddings=angles,
                position_ids=line[:, n:],
            )  # fmt: skip
        scale = below.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps
        v[n:] = (below * scale.rsqrt() * tensors["vertical_norm.weight"])[0]
    right, down = (tensors[f"{name}_head.weight"] for name in ("horizontal", "vertical"))
    for cell in range(len(cells)):
        row, column = divmod(cell, m)
        left, above = n + cell - 1, n + cell - m
        if not row and not column:
            line_of_h = h[left] @ tensors["hv_gate_corner.weight"][0]
            gate = (line_of_h + tensors["hv_gate_corner.bias"]).sigmoid()
            yield gate * (right @ h[left]) + (1 - gate) * (down @ v[left])
        elif not row or not column:
            yield down @ v[above] if row else right @ h[left]
        else:
            inner = tensors["hv_gate_mlp.0.weight"] @ torch.cat([h[left], v[above]])
            both = tensors["hv_gate_mlp.2.weight"] @ torch.nn.functional.silu(inner)
            gate = (both + tensors["hv_gate_mlp.2.bias"]).sigmoid()
            yield gate * (right @ h[left]) + (1 - gate) * (down @ v[above])


def by_hand(
    model: Any, n_layers: int, row: int, grid: Grid, options: dict[str, Any]
) -> tuple[list[int], Tensor]:
    """A row's tokens, diagonal by diagonal, and the guided logits `[S, V]` of its cells."""
    slots = [r * grid.columns + c for r in range(grid.rows) for c in range(grid.width)]
    cells = torch.zeros(len(slots), dtype=torch.int64)
    noise = Noise.from_seed([row], 1).gumbel(torch.tensor([slots]), VOCAB)[0]
    for step in range(grid.rows + grid.width - 1):
        logits = torch.stack([*logits_by_hand(model, n_layers, ROWS[row], cells, grid.width)])
        if "guidance_scale" in options:
            free = [*logits_by_hand(model, n_layers, OTHERS[row], cells, grid.width)]
            logits = torch.stack(free) + options["guidance_scale"] * (logits - torch.stack(free))
        if grid.tokens:
            logits[:, : grid.tokens[0]] = logits[:, grid.tokens[1] :] = -torch.inf
        temperature = options.get("temperature", 1.0)
        scores = logits / temperature + noise if temperature else logits
        for cell in range(len(cells)):
            if sum(divmod(cell, grid.width)) == step:
                cells[cell] = scores[cell].argmax()
    made = torch.full((grid.frame,), grid.image_end or 0)
    if grid.row_end:
        made[grid.width : grid.rows * grid.columns : grid.columns] = grid.row_end
    made[slots] = cells
    return made.tolist(), logits


def run(
    policy: Any, model: Any, grid: Grid, rows: tuple[int, ...] = (0, 1, 2), chunk: int = 0,
    fused: bool = False, **given: Any,
) -> Any:  # fmt: skip
    prompts = [ROWS[row] for row in rows]
    if "guidance_scale" in given:
        prompts += [OTHERS[row] for row in rows]
    window = CausalLMWindow(model, fused=fused)
    window.setup.prefill_chunk_size = chunk or None
    return sample(policy, window, prompts, grid.frame, seed=[*rows], layout=grid, **given)


@pytest.mark.parametrize(
    ("name", "n_layers", "options"),
    [
        ("plain", 2, {}),
        ("plain", 2, GUIDED),
        ("row ends", 1, GUIDED),
        ("row ends", 0, {"temperature": 0.0}),
        ("a column", 2, {}),
        ("a row", 2, {}),
    ],
)
def test_diagonals_by_hand(
    name: str, n_layers: int, options: dict[str, Any], tmp_path: Path
) -> None:
    model, grid = build(), GRIDS[name]
    policy = FlashAR(write(tmp_path, model, n_layers))
    seen = []

    def keep(scores: Tensor, tokens: Tensor, columns: Tensor) -> Tensor:
        seen.append((scores, columns))
        return scores

    made = run(policy, model, grid, processor=keep, **options)
    scores, columns = (torch.cat(parts, 1) for parts in zip(*seen))
    for row in range(3):
        tokens, logits = by_hand(model, n_layers, row, grid, options)
        assert made.tokens[row].tolist() == tokens
        near = scores[row, columns[row].argsort()]
        torch.testing.assert_close(near, logits, atol=1e-4, rtol=1e-4)
    n_passes = grid.rows + grid.width - 1
    assert made.stats.passes == n_passes and made.passes.tolist() == [n_passes] * 3
    n_prompts = 6 if "guidance_scale" in options else 3
    n_read = max(map(len, ROWS)) + grid.rows * grid.width - 1  # all but the last slot
    assert made.stats.tokens_processed == n_prompts * n_read


@pytest.mark.parametrize(
    "given",
    [
        {"rows": (2, 0)},
        {"fused": True},
        {"batching": ContinuousBatching(2)},
        {"batching": ContinuousBatching(2), "chunk": 1},
    ],
    ids=["other rows", "fused", "queue", "rows at other diagonals"],
)
def test_a_rows_tokens_are_its_own(given: dict[str, Any], tmp_path: Path) -> None:
    model, grid = build(), GRIDS["row ends"]
    policy = FlashAR(write(tmp_path, model))
    whole = run(policy, model, grid, **GUIDED)
    made = run(policy, model, grid, **GUIDED, **given)
    assert made.tokens.equal(whole.tokens[[*given.get("rows", (0, 1, 2))]])
    assert made.passes.tolist() == [5] * len(made.passes)


BEFORE, CELLS, NEIGHBOURS = Picture.is_before, Picture.list_cells, Picture.neighbours


def left_twice(picture: Picture, cells: Tensor) -> Any:
    left, above, has_left, has_above = NEIGHBOURS(picture, cells)
    return left, left.where(has_left, above), has_left, has_above


BUGS: dict[str, Any] = {
    "neighbours": left_twice,
    "is_before": lambda picture, cells, turns: BEFORE(picture, cells, turns - 1),
    "list_cells": lambda picture, number: CELLS(picture, number).flip(1),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another row's head, a diagonal that is not seen, entries that stand in another order."""
    model, grid = build(), GRIDS["plain"]
    policy = FlashAR(write(tmp_path, model))
    whole = run(policy, model, grid)
    monkeypatch.setattr(Picture, name, BUGS[name])
    assert not run(policy, model, grid).tokens.equal(whole.tokens)


def test_what_is_refused(tmp_path: Path) -> None:
    model, grid = build(), GRIDS["plain"]
    folder = write(tmp_path, model)
    with pytest.raises(MMAccelError, match="one image of 12 slots for FlashAR, received 13"):
        sample(FlashAR(folder), CausalLMWindow(model), [[5]], 13, layout=grid)
    with torch.no_grad():
        model.lm_head.weight[3] += 1
    with pytest.raises(MMAccelError, match="were trained with, received one with another output"):
        run(FlashAR(folder), model, grid)
    write(tmp_path, model, vertical_layers=1)
    with pytest.raises(MMAccelError, match=r"'vertical_block.1.* none, as .* asks, received"):
        run(FlashAR(folder), model, grid)
    write(tmp_path, model, vertical_start_layer=4)
    with pytest.raises(MMAccelError, match=r"vertical_start_layer in 0\.\.3 .* received 4"):
        run(FlashAR(folder), model, grid)
    write(tmp_path, model, model_type="qwen3")
    with pytest.raises(MMAccelError, match="'emu3_flashar' in .*, received 'qwen3'; take"):
        run(FlashAR(folder), model, grid)
