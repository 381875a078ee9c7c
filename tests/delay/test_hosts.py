"""All hosts under window policies: through their own `generate`, codes are those of their loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.pipelines.hosts.delay.dia import DiaRules, DiaSteps
from mmaccel.pipelines.hosts.delay.family import CodeDecoder
from mmaccel.pipelines.hosts.delay.higgs import HiggsRules, HiggsSteps
from mmaccel.pipelines.hosts.delay.musicgen import MusicgenSteps
from tests.delay import test_dia, test_higgs, test_musicgen
from tests.delay.hosts import (
    BITWISE,
    CALLS,
    CLASSES,
    HOSTS,
    SJD,
    WIDE,
    is_refused,
    make_host,
    open_host,
)
from tests.fixtures.graph_replay import replay_runs
from tests.fixtures.tiny_lms import falls_back

EACH_CALL = [(name, call) for name in HOSTS for call in CALLS[name]]
SAMPLED = {"do_sample": True, "temperature": 1.2, "top_k": 9, "top_p": 0.95}
GUIDED = {"do_sample": True, "guidance_scale": 2.0}
STEPS = {"musicgen": MusicgenSteps, "dia": DiaSteps, "higgs": HiggsSteps}


@pytest.mark.parametrize(("name", "call"), EACH_CALL)
def test_greedy_codes_are_those_of_the_models_own_loop(name: str, call: str) -> None:
    host, options = open_host(name), CALLS[name][call]
    own = host.call(**options)
    for policy in (WIDE, SJD):
        assert torch.equal(host.attached(policy, **options)[0], own)
    assert torch.equal(host.call(**options), own)  # detached


@pytest.mark.parametrize(
    ("name", "is_guided"),
    [(name, False) for name in CLASSES] + [(name, True) for name in HOSTS if name != "higgs"],
)
def test_sampled_codes_are_the_same_under_all_bitwise_policies(name: str, is_guided: bool) -> None:
    host = open_host(name)
    options = SAMPLED | GUIDED if is_guided else SAMPLED
    own, stats = host.attached(BITWISE[0], **options)
    for policy in BITWISE[1:]:
        made, cost = host.attached(policy, **options)
        assert torch.equal(made, own) and cost.passes < stats.passes
    assert cost.passes <= host.count_steps(own)  # a step each, and one
    assert not torch.equal(host.attached(BITWISE[0], seed=4, **options)[0], own)


@pytest.mark.parametrize("name", CLASSES)
def test_a_row_does_not_depend_on_the_batch(name: str) -> None:
    host = open_host(name)
    options = {"do_sample": True} if name == "higgs" else GUIDED
    rows = len(host.usual["input_ids"])
    several, _ = host.attached(WIDE, seed=[5 + row for row in range(rows)], **options)
    for row in range(rows):
        alone, _ = host.attached(WIDE, seed=[5 + row], **options, **host.take_row(row))
        assert torch.equal(alone[0], several[row, : alone.shape[1]])


@pytest.mark.parametrize("name", HOSTS)
def test_a_returned_object_has_the_codes(name: str) -> None:
    host = open_host(name)
    options = {"return_dict_in_generate": True}
    own = host.generate(**options)
    with mmaccel.attach(host.model, WIDE, strict=True):
        made = host.generate(**options)
    assert type(made) is type(own)
    assert set(made) == set(own) - {"cache"}  # which windows do not fill
    assert all(torch.equal(made[field], own[field]) for field in made)


def test_refused_calls_run_the_models_own_loop() -> None:
    host = open_host("musicgen")
    options = {"return_dict_in_generate": True, "output_scores": True}
    own = host.call(**options)
    with falls_back(host.model, "^output_scores$|ran without the policy: output_scores"):
        assert torch.equal(host.call(**options), own)


REFUSED = {"dia": test_dia.REFUSED, "higgs": test_higgs.REFUSED, "musicgen": test_musicgen.REFUSED}


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, cases in REFUSED.items() for case in cases]
)
def test_what_is_refused(name: str, case: str) -> None:
    options, says = REFUSED[name][case]
    assert is_refused(open_host(name), says, **options)


@pytest.mark.parametrize("name", CLASSES)
def test_a_cache_of_the_callers_is_refused(name: str) -> None:
    """Even where the caller gets an object back: nothing would have filled the cache."""
    from transformers import DynamicCache, EncoderDecoderCache

    cache: Any = DynamicCache()
    if name in ("musicgen", "dia"):
        cache = EncoderDecoderCache(cache, DynamicCache())
    given = {"cache": cache, "return_dict_in_generate": True}
    assert is_refused(open_host(name), "a cache given by the caller", **given)


class Listener:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.heard: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self.heard.append(value)

    def end(self) -> None:
        pass


@pytest.mark.parametrize("name", ["melody", "dia", "higgs"])
def test_streamers_are_refused(name: str) -> None:
    assert is_refused(open_host(name), "a streamer or", streamer=Listener())


def test_musicgen_gives_a_streamer_its_prompt_alone() -> None:
    host = open_host("musicgen")
    streamers = [Listener(), Listener()]
    own = host.call(streamer=streamers[0])
    made, _ = host.attached(WIDE, streamer=streamers[1])
    assert torch.equal(made, own)
    first, second = (torch.cat(streamer.heard) for streamer in streamers)
    assert torch.equal(first, second)


def test_calls_that_a_model_prepares_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` of a child class may do so; that of transformers gives a limit."""
    from transformers import StoppingCriteriaList

    host = open_host("dia")
    monkeypatch.setattr(
        host.model, "_get_stopping_criteria", lambda *_, **__: StoppingCriteriaList()
    )
    assert is_refused(host, "no limit on the number of tokens")


@pytest.mark.parametrize(("name", "rules"), [("dia", DiaRules), ("higgs", HiggsRules)])
def test_ends_that_are_not_a_rows_own_are_seen(
    name: str, rules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = open_host(name)
    own = host.call()
    find = rules.find_ends

    def leak(self: Any, tokens: Tensor, at: Tensor) -> Tensor:
        return find(self, tokens, at).amin(0).expand_as(at)

    def begin(self: Any, tokens: Tensor, at: Tensor) -> Tensor:
        return find(self, tokens, at[:, :1]).expand_as(at)

    monkeypatch.setattr(rules, "find_ends", leak)  # rows share an end
    assert not torch.equal(host.attached(WIDE)[0], own)
    monkeypatch.setattr(rules, "find_ends", begin)  # an end among drafts is not seen
    assert torch.equal(host.attached(BITWISE[0])[0], own)  # where every pass decides one code
    assert not torch.equal(host.attached(WIDE)[0], own)


@pytest.mark.parametrize("name", list(STEPS))
def test_books_that_are_off_by_one_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = STEPS[name]
    forward = steps.forward

    def shifted(self: Any, codes: Tensor, at: Tensor) -> Tensor:
        return forward(self, codes.roll(1, 2), at)

    host = open_host(name)
    own = host.call()
    monkeypatch.setattr(steps, "forward", shifted)
    assert "one whose windows give logits" in mmaccel.supports(make_host(name).model).reason
    own_passes = CodeDecoder.compared
    monkeypatch.setattr(CodeDecoder, "compared", lambda *given: own_passes(*given)[:1] * 2)
    assert not torch.equal(host.attached("jacobi")[0], own)


@pytest.mark.parametrize("name", HOSTS)
def test_captured_passes_make_the_codes_of_eager_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = open_host(name)
    eager, _ = host.attached(WIDE, **SAMPLED)
    replay_runs(monkeypatch)
    made, stats = host.attached(WIDE, **SAMPLED)
    assert torch.equal(made, eager)
    assert stats.runner == "cuda graphs" and stats.captures > 0
