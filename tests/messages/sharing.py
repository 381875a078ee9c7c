"""`share_prefix=True` and prefix trees beside what rows choose, store or attend to one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import mmaccel
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.runner.engine import Engine
from tests.fixtures.checkpoints import build_checkpoint, captions
from tests.fixtures.denoiser_targets import TARGETS
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


def _embed() -> None:
    model = build_lm("llama")
    embedded = model.get_input_embeddings()(torch.tensor([[5, 6, 7]] * 2))
    with mmaccel.attach(model, "jacobi", share_prefix=True):
        model.generate(inputs_embeds=embedded, max_new_tokens=2)


def _open(name: str, **options: Any) -> Any:
    return mmaccel.TextToImage.from_pretrained(name, device="cpu", share_prefix=True, **options)


def _draw(name: str, **options: Any) -> Callable[[], Any]:
    def call() -> None:
        pipe = _open(name)
        pipe(pipe.image_model.examples[0], **options)

    return call


def _draw_by_llamagen() -> None:
    with TemporaryDirectory() as folder:
        pipe = _open(str(build_checkpoint("llamagen-t2i", Path(folder))))
        pipe([captions("llamagen-t2i")[0]] * 2)


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


def _serve_llamagen() -> None:
    with TemporaryDirectory() as folder:
        model = str(build_checkpoint("llamagen-t2i", Path(folder)))
        pipe = mmaccel.TextToImage.from_pretrained(model, device="cpu")
        requests = [mmaccel.Request(captions("llamagen-t2i")[0], 0)]
        params = pipe.image_model.params
        pipe.serve(requests, params, deliver=print, prefix_tree=mmaccel.PrefixTree())


def _draft_by_a_model() -> None:
    batching = mmaccel.ContinuousBatching(1, prefix_tree=mmaccel.PrefixTree())
    policy = mmaccel.Speculative(3, mmaccel.CausalLMWindow(build_lm("qwen2")))
    policy.sample(
        mmaccel.CausalLMWindow(build_lm("llama")),
        mmaccel.Prompt(torch.tensor([[5, 6, 7]]), torch.tensor([3]), batching=batching),
        4,
        params=mmaccel.SamplingParams(),
        noise=mmaccel.Noise.from_seed(0, 1),
    )


CASES = (
    *(
        Refused(
            f"sharing by {value!r}",
            lambda value=value: Engine(share_prefix=value),  # type: ignore[misc]
            says=("share_prefix", "'auto', True or False", "same prompt"),
        )
        for value in ("yes", 1, None)
    ),
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
        "sharing in layers that all slide",
        _attach("mistral"),
        says=("share_prefix=True", "every layer sees the last 5 positions", "share_prefix='auto'"),
        error=UnsupportedModelError,
    ),
    Refused(
        "sharing beside drafts of the model itself",
        _generate(mmaccel.Speculative(4, drafts="vegas")),
        says=("drafts", "Vegas", "one stored prompt", "leave share_prefix out"),
    ),
    Refused(
        "sharing with attentions of all tokens",
        _generate(output_attentions=True, return_dict_in_generate=True),
        says=("share_prefix=True", "attentions"),
        error=UnsupportedModelError,
    ),
    Refused(
        "sharing embeddings",
        _embed,
        says=("share_prefix=True", "more than ids", "its own prefill"),
        error=UnsupportedModelError,
    ),
    Refused(
        "sharing in passes over a canvas",
        _draw("scenes-masked"),
        says=("share_prefix=True", "canvas"),
        error=UnsupportedModelError,
    ),
    Refused(
        "sharing by a denoiser of others",
        lambda: mmaccel.attach(next(iter(TARGETS.values()))(), "stepwise", share_prefix=True),
        says=("share_prefix", "'auto' or False", "whole canvases"),
    ),
    Refused(
        "sharing by a transformer of our own",
        _draw_by_llamagen,
        says=("share_prefix=True", "LlamaGenWindow", "leave it out"),
        error=UnsupportedModelError,
    ),
    Refused(
        "sharing by rows that are admitted later",
        _serve(rows=2),
        says=("share_prefix=True", "3 rows of which 2", "share_prefix='auto'"),
        error=UnsupportedModelError,
    ),
    Refused(
        "sharing prompts in chunks beside rows that decode",
        _serve(chunk=8),
        says=("share_prefix=True", "in chunks", "leave it out"),
        error=UnsupportedModelError,
    ),
    *(
        Refused(
            f"a tree whose {name} is 0",
            lambda name=name: mmaccel.PrefixTree(**{name: 0}),  # type: ignore[misc]
            says=(name, "an integer >= 1", "0", "try"),
        )
        for name in ("max_tokens", "chunk_size", "least", "shared_from")
    ),
    Refused(
        "a number of tokens for a tree",
        _serve_kept(tree=4096),
        says=("prefix_tree", "a mmaccel.PrefixTree", "4096", "make one"),
    ),
    Refused(
        "a tree beside eviction",
        _serve_kept(kv_cache="snapkv"),
        says=("prefix_tree", "kv_cache", "leave it out"),
        error=UnsupportedModelError,
    ),
    Refused(
        "a tree beside entries in fewer bits",
        _serve_kept(kv_cache="quantized-cache"),
        says=("prefix_tree", "kv_cache", "leave it out"),
        error=UnsupportedModelError,
    ),
    Refused(
        "a tree beside chosen blocks",
        _serve_kept(attention="quest"),
        says=("prefix_tree", "attention", "leave it out"),
        error=UnsupportedModelError,
    ),
    Refused(
        "a tree of canvases",
        _serve_kept("scenes-masked"),
        says=("prefix_tree", "canvases", "leave it out"),
        error=UnsupportedModelError,
    ),
    Refused(
        "a tree of prompts that are more than tokens",
        _serve_llamagen,
        says=("prefix_tree", "more than their tokens", "leave it out"),
        error=UnsupportedModelError,
    ),
    Refused(
        "a tree beside a draft model",
        _draft_by_a_model,
        says=("prefix_tree", "DraftModel", "leave one of them out"),
    ),
    Refused(
        "sharing by rows that join",
        _serve(arrivals=lambda n: None),
        says=("share_prefix=True", "may join"),
        error=UnsupportedModelError,
    ),
)
