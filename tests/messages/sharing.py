"""`share_prefix=True` and prefix trees beside what rows choose, store or attend to one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import mmaccel
from mmaccel.errors import UnsupportedModelError
from tests.fixtures.tiny_lms import build_lm
from tests.messages.case import Refused


def _attach(name: str = "llama", policy: Any = "jacobi", **options: Any) -> Callable[[], Any]:
    return lambda: mmaccel.attach(build_lm(name), policy, share_prefix=True, **options)


def _generate(policy: Any = "jacobi", **options: Any) -> Callable[[], Any]:
    def call() -> None:
        model = build_lm("llama")
        model.set_attn_implementation("eager")
        with mmaccel.attach(model, policy, share_prefix=True, strict=True):
            model.generate(torch.tensor([[5, 6, 7]] * 2), max_new_tokens=2, **options)

    return call


def _open(name: str, **options: Any) -> Any:
    return mmaccel.TextToImage.from_pretrained(name, device="cpu", share_prefix=True, **options)


def _draw(name: str, **options: Any) -> Callable[[], Any]:
    def call() -> None:
        pipe = _open(name)
        pipe(pipe.image_model.examples[0], **options)

    return call


def _serve(chunk: int | None = None, **options: Any) -> Callable[[], Any]:
    def call() -> None:
        pipe = _open("scenes", prefill_chunk_size=chunk)
        requests = [mmaccel.Request(pipe.image_model.examples[0], seed) for seed in range(3)]
        pipe.serve(requests, pipe.image_model.params, deliver=print, **options)

    return call


def _serve_kept(name: str = "scenes", tree: Any = None, **options: Any) -> Callable[[], Any]:
    def call() -> None:
        pipe = mmaccel.TextToImage.from_pretrained(name, device="cpu")
        requests = [mmaccel.Request(pipe.image_model.examples[0], 0)]
        kept = mmaccel.PrefixTree() if tree is None else tree
        pipe.serve(requests, pipe.image_model.params, deliver=print, prefix_tree=kept, **options)

    return call


CASES = (
    Refused(
        "sharing beside eviction",
        _attach(kv_cache="snapkv"),
        says=("share_prefix=True", "kv_cache", "leave one of them out"),
    ),
    Refused(
        "sharing beside chosen blocks",
        _draw("scenes", attention="quest"),
        says=("share_prefix=True", "attention", "leave one of them out"),
    ),
    Refused(
        "sharing beside drafts of the model itself",
        _generate(mmaccel.Speculative(4, drafts="vegas")),
        says=("drafts", "Vegas", "one stored prompt", "leave share_prefix out"),
    ),
    Refused(
        "sharing in passes over a canvas",
        _draw("scenes-masked"),
        says=("share_prefix=True", "canvas"),
        error=UnsupportedModelError,
    ),
    Refused(
        "a tree beside eviction",
        _serve_kept(kv_cache="snapkv"),
        says=("prefix_tree", "kv_cache", "leave it out"),
        error=UnsupportedModelError,
    ),
    Refused(
        "sharing by rows that join",
        _serve(arrivals=lambda n: None),
        says=("share_prefix=True", "may join"),
        error=UnsupportedModelError,
    ),
)
