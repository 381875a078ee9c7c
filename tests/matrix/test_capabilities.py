"""What is said to go together runs and is right; what is said not to go fails when it is forced.

Pairs are made from the catalog: every method of caches and attention beside every option, policy
and method of the other slot. A pair is right where its tokens are those without the option, and
each row has those that it has alone.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import mmaccel
from mmaccel import capabilities
from mmaccel.capabilities import GLOSSARY, Capable, Reason, explain, refuse
from mmaccel.catalog import METHODS, load
from mmaccel.contracts import Denoiser, TokenModel
from mmaccel.errors import MMAccelError, OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.layers.sparse import SparseBlocks
from mmaccel.pipelines.hosts.runner.engine import Engine
from mmaccel.reduction.kv_cache.contract import CacheMethod, KVCacheMethod
from mmaccel.reduction.sparse_attention.contract import AttentionMethod
from tests.fixtures.graph_replay import Replay
from tests.fixtures.tiny_lms import build_lm
from tests.layers.test_eviction import draw_rows, generate
from tests.matrix.examples import Target, make

OPTIONS: dict[str, dict[str, Any]] = {
    "tree": {
        "policy": mmaccel.Jacobi(
            window=5, drafts="token-recycling", tree=mmaccel.Comb(branches=2, length=3)
        )
    },
    "shared": {"share_prefix": True},
    "chunks": {"prefill_chunk_size": 7},
    "window": {"policy": mmaccel.Jacobi(window=5)},
    "captured": {"cuda_graphs": True},
}
UNSEEN = {"eviction"}  # nothing fails that this test could see: a layer reads another one's blocks
N_NEW = 40


class Pair(NamedTuple):
    """A method beside an option, or beside a method of the other slot."""

    methods: dict[str, Any]
    option: str = ""

    def __str__(self) -> str:
        return " ".join([*map(repr, self.methods.values()), self.option])


def methods_of(slot: str) -> list[Any]:
    """Those of the catalog; evicting ones once more in rounds, where they take them."""
    target = Target(build_lm("llama"))
    found = [make(slot, name, target) for name in METHODS[slot]]
    for name, entry in METHODS[slot].items():
        if issubclass(load(entry.target), CacheMethod):
            try:
                found.append(make(slot, name, target, every=12))  # a tree has 10 entries
            except OptionError:
                continue
    return found


def pairs() -> Iterator[Pair]:
    """Of every method and option, and of methods of both slots."""
    of_caches, of_attention = methods_of("kv_cache"), methods_of("attention")
    for slot, methods in (("kv_cache", of_caches), ("attention", of_attention)):
        yield from (Pair({slot: each}, option) for each in methods for option in OPTIONS)
    for each in of_caches:
        yield from (Pair({"kv_cache": each, "attention": other}) for other in of_attention)


PAIRS = list(pairs())


def reasons_of(pair: Pair) -> list[Reason]:
    """What `explain` says of a pair."""
    given = dict(OPTIONS.get(pair.option, {}))
    policy = given.pop("policy", None)
    return explain(*pair.methods.values(), policy, Engine(**given))


def sampled(found: list[Pair], most: int, first: int = 0) -> list[Pair]:
    """So many of each option, or reason why not; always the same ones, others from `first` on."""
    kinds = defaultdict(list[Pair])
    for pair in sorted(found, key=lambda pair: hashlib.sha256(str(pair).encode()).digest()):
        seen = [reason.word for reason in reasons_of(pair) if is_seen(reason)]
        kinds[seen[0] if seen else pair.option].append(pair)
    return [pair for own in kinds.values() for pair in own[first : first + most]]


def run(pair: Pair, rows: list[list[int]], with_option: bool = True) -> Tensor:
    """The new tokens of a pair."""
    given = dict(OPTIONS.get(pair.option, {})) if with_option else {}
    policy = given.pop("policy", mmaccel.Autoregressive())
    if given.pop("cuda_graphs", False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Engine, "runner", lambda self, *_: Replay(1, self.cache))
            return run(pair, rows, with_option=False)
    given |= {"fused": False, "max_new_tokens": N_NEW} | pair.methods
    tokens: Tensor = generate(build_lm("llama"), policy, rows, **given)[0]
    return tokens


def find_fault(pair: Pair) -> str:
    """What is wrong about a pair's tokens; empty where they are right."""
    first, _, last = draw_rows(26, 18, 30)
    rows = [first, first, last]  # two share all of their prompts
    together = run(pair, rows)
    chooses = any("step blocks" in method.needs for method in pair.methods.values())
    stale = find_stale(pair, rows) if chooses and pair.option != "captured" else ""
    if stale or (chooses and pair.option in ("tree", "window")):  # for all queries of a window
        return stale
    one, other = (run(pair, [row])[0] for row in (first, last))
    if not torch.stack([one, one, other]).equal(together):
        return "a row has other tokens alone"
    if not run(pair, rows, with_option=False).equal(together):
        return "the option changes tokens"
    return ""


def find_stale(pair: Pair, rows: list[list[int]]) -> str:
    """Whether blocks are chosen by something else than the keys that they hold; by hand: their
    summaries are made anew of all keys, in every pass.
    """
    follow = SparseBlocks._follow
    choose = SparseBlocks._choose_by_scores
    off = list[float]()

    def note(own: SparseBlocks, layer: int, key: Tensor, is_real: Tensor, made: Tensor) -> None:
        kept = own._summaries.pop(layer)
        anew = follow(own, layer, key, None, is_real)
        own._summaries[layer] = kept
        assert anew is not None
        missing = anew.shape[2] * own.method.block - is_real.shape[1]
        holds = pad(is_real, (0, missing)).unflatten(1, (anew.shape[2], -1)).any(2)
        off.append(float((made - anew)[holds[:, None].expand(made.shape[:3])].abs().max()))

    def compare(own: SparseBlocks, layer: int, key: Tensor, at: Any, is_real: Tensor) -> Any:
        made = follow(own, layer, key, at, is_real)
        if at is None:  # of a prompt: nothing is chosen yet
            return made
        if made is None:
            off.append(0.0)
            return None
        note(own, layer, key, is_real, made.clone())
        return made

    def compare_scored(
        own: SparseBlocks, layer: int, query: Tensor, key: Tensor, start: Tensor, scale: float
    ) -> Any:
        chosen = choose(own, layer, query, key, start, scale)
        is_real = torch.arange(key.shape[2]) < (start + query.shape[2])[:, None]
        n_blocks = -(-key.shape[2] // own.method.block)
        made = own._summaries[layer][..., :n_blocks].mT.clone()
        note(own, layer, key, is_real, made)
        return chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseBlocks, "_follow", compare)
        patch.setattr(SparseBlocks, "_choose_by_scores", compare_scored)
        run(pair, rows)
    if not off:
        return "no block is chosen"
    return "blocks are chosen by keys that they no longer hold" if max(off) > 1e-4 else ""


def is_seen(reason: Reason) -> bool:
    """Whether a test can see what is wrong about a pair: rounds that take place, and summaries."""
    if reason.word != "step blocks":
        return reason.word in GLOSSARY.keys() - UNSEEN
    sums_up = type(reason.part).summarise is not AttentionMethod.summarise
    every = getattr(reason.other, "every", None)
    return getattr(reason.other, "is_headwise", False) or (sums_up and (every or 1) < N_NEW)


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing says no."""
    monkeypatch.setattr(capabilities, "compare", lambda *_: iter(()))
    monkeypatch.setattr(CausalLMWindow, "lack", lambda *_: "")


GOES = [pair for pair in PAIRS if not reasons_of(pair)]
FAILS = [pair for pair in PAIRS if any(map(is_seen, reasons_of(pair)))]


@pytest.mark.parametrize("pair", sampled(GOES, 1), ids=str)
def test_what_goes_together_is_right(pair: Pair) -> None:
    assert find_fault(pair) == ""


@pytest.mark.slow
@pytest.mark.parametrize("pair", sampled(GOES, 11, 1), ids=str)
def test_more_that_goes_together_is_right(pair: Pair) -> None:
    assert find_fault(pair) == ""


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("pair", sampled(FAILS, 4), ids=str)
def test_what_does_not_go_fails_when_forced(pair: Pair) -> None:
    try:
        fault = find_fault(pair)
    except MMAccelError as error:
        pytest.fail(f"another place than `explain` says no: {error}")
    except Exception as error:  # of torch or an assertion, somewhere inside
        fault = repr(error)
    assert fault


REFUSED = [pair for pair in PAIRS if reasons_of(pair) and pair.option != "captured"]  # needs a GPU


@pytest.mark.parametrize("pair", REFUSED[::7], ids=str)
def test_a_refusal_names_both_parts_and_what_helps(pair: Pair) -> None:
    """All reasons; without the named part the rest goes."""
    found = reasons_of(pair)
    with pytest.raises(OptionError) as caught:
        run(pair, draw_rows(9))
    lines = str(caught.value).split("; also ")
    assert len(lines) >= len(found)
    for reason in found:
        line = str(reason)
        assert line in lines
        assert repr(reason.part) in line and repr(reason.other) in line
        assert "expected" in line and "received" in line and "out" in line.rpartition(";")[2]
    for slot in pair.methods:
        rest = Pair({k: v for k, v in pair.methods.items() if k != slot}, pair.option)
        assert not reasons_of(rest)


def test_words_are_of_the_glossary() -> None:
    assert len(GLOSSARY) <= 50
    for pair in PAIRS:
        for method in pair.methods.values():
            assert method.needs <= GLOSSARY.keys() and method.excludes.keys() <= GLOSSARY.keys()
    for cls in (CausalLMWindow, TokenModel, Denoiser):
        assert frozenset(cls.offers) <= GLOSSARY.keys()


class Newcomer(KVCacheMethod):
    """A method with a need of its own, that no model offers, in one class."""

    needs = frozenset({"own attention", "a need of its own"})


def test_a_new_need_is_refused_everywhere_without_another_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    word = capabilities.Word("something that is new")
    monkeypatch.setitem(GLOSSARY, "a need of its own", word)
    method = Newcomer()
    with pytest.raises(UnsupportedModelError, match="something that is new"):
        mmaccel.attach(build_lm("llama"), "jacobi", kv_cache=method)
    assert [each.word for each in explain(method, CausalLMWindow(build_lm("llama")))] == [
        "a need of its own"
    ]


def test_a_part_that_declares_nothing_goes_with_everything() -> None:
    assert not explain(object(), None, Capable(), mmaccel.TOVA(budget=8))
    refuse([])
