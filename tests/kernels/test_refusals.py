"""Arguments that a Triton kernel cannot take: its table says why, before work."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest
import torch
from torch import Tensor

from mmaccel.kernels.dispatch import KERNELS, refuse
from mmaccel.kernels.gated_act import gated_act
from mmaccel.kernels.norm import HeadNorms
from mmaccel.kernels.rope_write import rope_write
from mmaccel.kernels.takes import CACHE, HEADS, Takes

ROWS = torch.zeros(4, 8)
WIDE = torch.zeros(1, 1, 8, 320)
FAR = torch.empty_strided((1, 1, 2, 4), (0, 0, 2**30, 1), dtype=torch.float32, device="meta")
REFUSED = {
    "another dtype": (Takes((torch.float32,)), ROWS.double(), "float64"),
    "another dtype than beside it": (Takes(like="q"), ROWS.half(), "beside q in torch.float32"),
    "other axes": (Takes(axes=4), ROWS, "4 axes"),
    "too wide": (Takes(widest=7), ROWS, "at most 7"),
    "too many bytes": (HEADS, WIDE, "at most 512 bytes"),
    "numbers apart": (Takes(), ROWS[:, ::2], "2 apart"),
    "entries that reach too far": (CACHE, FAR, "reaches 2147483648 numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_says_what_it_does_not_take(name: str) -> None:
    takes, tensor, words = REFUSED[name]
    assert words in str(takes.refuse("x", tensor, ROWS))
    assert takes.refuse("x", torch.zeros(1, 1, 4, 4), ROWS) is None


def test_rows_are_of_arguments() -> None:
    """One that a call leaves out, or that has no such part, is not looked at."""
    pytest.importorskip("triton")
    for kernel, name in KERNELS.items():
        specification = getattr(import_module(f"mmaccel.kernels.{kernel}"), name)
        rows = getattr(import_module(f"mmaccel.kernels.{kernel}_triton"), "TAKES", {})
        known = inspect.signature(specification).parameters
        assert {path.partition(".")[0] for path in rows} <= set(known), kernel
        assert {row.like for row in rows.values()} <= {"", *known}, kernel
    assert "float64" in str(refuse(gated_act, (ROWS.double(),), {}))
    store, index = torch.zeros(4, 1, 4), torch.arange(2)
    given = (torch.zeros(2, 16400), None, None, store, store, index)
    assert refuse(rope_write, given, {}) is None
    norms = HeadNorms(torch.zeros(16392), torch.zeros(4))
    assert "at most 8192" in str(refuse(rope_write, given, {"norms": norms}))


SPOILED = {"double": Tensor.double, "apart": lambda x: x.repeat_interleave(2, -1)[..., ::2]}
WRONG: dict[str, dict[str, str]] = {  # kernel -> tensor -> what its pointers would read wrongly
    "window_attention": {"q": "double", "k": "double apart", "v": "double apart"},
    "packed_attention": {"q": "double", "k": "double apart", "v": "double apart"},
    "pack_group": {"k": "double apart", "v": "double apart"},
    "column_mass": {"q": "double", "k": "double apart"},
    "block_scores": {"q": "double", "k": "double apart", "summaries": "double"},
    "choose_blocks": {"scores": "double apart"},
    "compact": {"store": "apart"},
    "window_inputs": {"tokens": "apart"},
    "sample": {"logits": "double apart"},
    "unmask": {"logits": "double apart"},
    "couple": {"scores": "double apart", "p_draft": "double apart"},
    "add_norm": {"hidden": "double apart", "update": "apart"},
    "gated_act": {"packed": "double apart"},
    "row_product": {"x": "double apart", "weight": "double apart", "total": "apart"},
    "rope_write": dict.fromkeys(("qkv", "keys", "values"), "double apart"),
    "accept_prefix": dict.fromkeys(("new", "peak", "variation"), "apart"),
}


@pytest.mark.parametrize("kernel", WRONG)
def test_a_kernel_refuses_what_it_would_read_wrongly(kernel: str) -> None:
    pytest.importorskip("triton")
    specification = getattr(import_module(f"mmaccel.kernels.{kernel}"), KERNELS[kernel])
    shape = (1, 2, 4, 8) if {"q", "k"} & {*WRONG[kernel]} else (4, 8)
    given = {name: torch.zeros(shape) for name in WRONG[kernel]}
    assert refuse(specification, (), given) is None
    for name, ways in WRONG[kernel].items():
        for way in ways.split():
            said = str(refuse(specification, (), given | {name: SPOILED[way](given[name])}))
            is_named = said.startswith(name)
            # another tensor may be the one whose dtype is not that beside it
            assert is_named or (way == "double" and said != "None"), (name, way, said)
