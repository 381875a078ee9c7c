"""What changes an attached model waits for its running calls, or is refused inside one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import BusyError
from mmaccel.pipelines.hosts.layers.attention_function import NAME
from tests.fixtures.tiny_lms import act_at, build_lm
from tests.layers.test_hidden_states import ByHidden

IDS = torch.tensor([[5, 6, 7]])
OPTIONS: dict[str, Any] = dict(
    max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
)
CHANGES: dict[str, Callable[[Any, mmaccel.Handle], object]] = {
    "detach the handle": lambda model, handle: handle.detach(),
    "detach the model": lambda model, handle: mmaccel.detach(model),
    "reset": lambda model, handle: handle.reset(),
    "to": lambda model, handle: model.to(torch.float64),
    "half": lambda model, handle: model.half(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_inside_a_call_a_change_is_refused(name: str) -> None:
    model = build_lm("llama")
    plain = model.generate(IDS, **OPTIONS)

    def act() -> None:
        with pytest.raises(BusyError, match="expected no running call"):
            CHANGES[name](model, handle)

    with mmaccel.attach(model, mmaccel.Jacobi(4), fused=True) as handle:
        out = model.generate(IDS, stopping_criteria=[act_at(3, act)], **OPTIONS)
        assert out.equal(plain) and handle.stats is not None and not handle.stats.fallbacks
        CHANGES[name](model, handle)  # the remedy: after the call


@pytest.mark.parametrize("name", ["detach the handle", "to"])
def test_another_thread_waits(name: str) -> None:
    model = build_lm("llama")
    plain, events = model.generate(IDS, **OPTIONS), []
    handle = mmaccel.attach(model, mmaccel.Jacobi(4), fused=True)

    def change() -> None:
        CHANGES[name](model, handle)
        events.append("changed")

    other = threading.Thread(target=change)

    def act() -> None:
        other.start()
        other.join(0.05)
        assert other.is_alive()  # it waits

    out = model.generate(IDS, stopping_criteria=[act_at(3, act)], **OPTIONS)
    events.append("generated")
    other.join(30)
    assert out.equal(plain) and sorted(events) == ["changed", "generated"]
    assert model.generate(IDS, **OPTIONS).shape == plain.shape
    handle.detach()
    assert len(handle.history) == 1 + (not name.startswith("detach"))


@pytest.mark.parametrize(
    "methods", [{"attention": mmaccel.Quest(0.3, block=4)}, {"kv_cache": ByHidden(budget=9)}]
)
def test_passes_of_threads_may_overlap(methods: dict[str, Any]) -> None:
    """The second thread's pass begins inside one of the first, and ends behind that call."""
    model = build_lm("qwen2")
    prompt = torch.arange(5, 29)[None]
    first, inside, ended = threading.get_ident(), threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        if model.config._attn_implementation != NAME:
            return  # a pass of transformers' own
        if threading.get_ident() != first:
            inside.set()
            ended.wait(30)
        else:
            assert inside.wait(30)

    def generate() -> None:
        made.append(model.generate(prompt, **OPTIONS))

    with mmaccel.attach(model, mmaccel.Jacobi(4), fused=False, **methods) as handle:
        made: list[Tensor] = []
        generate()
        second = threading.Thread(target=generate)
        hook = model.model.layers[0].register_forward_pre_hook(hold)
        second.start()
        generate()
        ended.set()
        second.join()
        hook.remove()
        generate()
        assert all(each.equal(made[0]) for each in made) and len(made) == 4
        assert not any(stats.fallbacks for stats in handle.history)


def test_a_call_inside_a_call_does_not_wait_for_a_change() -> None:
    """Another thread waits to detach; the running call may call the model once more."""
    model = build_lm("llama")
    handle = mmaccel.attach(model, mmaccel.Jacobi(4))
    other = threading.Thread(target=handle.detach)

    def act() -> None:
        other.start()
        other.join(0.05)
        model.generate(IDS, max_new_tokens=2, pad_token_id=0)

    model.generate(IDS, stopping_criteria=[act_at(3, act)], **OPTIONS)
    other.join(30)
    assert not other.is_alive() and len(handle.history) == 2


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["left", "left", "left", "qwen2", "qwen2"])
def test_the_first_calls_of_threads_make_what_is_kept_once(drafts: str) -> None:
    """Packed weights and self-checks: all threads find the first one's. A draft model, which a
    policy holds for all of them, serves one at a time.
    """
    model, made = build_lm("llama"), []
    policy: Any = mmaccel.Jacobi(4)
    if drafts == "qwen2":
        policy = mmaccel.Speculative(draft_model=build_lm(drafts), window=4)
    plain, start = model.generate(IDS, **OPTIONS), threading.Barrier(4)

    def generate() -> None:
        start.wait()
        made.append(model.generate(IDS, **OPTIONS))

    with mmaccel.attach(model, policy) as handle:
        threads = [threading.Thread(target=generate) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(made) == 4 and all(out.equal(plain) for out in made)
        assert [stats.route for stats in handle.history] == ["fused"] * 4
