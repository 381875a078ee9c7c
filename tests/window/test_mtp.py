"""Multi-token prediction: drafts of transformers' own layer; tokens stay the plain loop's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel import CausalLMWindow, ContinuousBatching, Jacobi, Noise, SamplingParams, Speculative
from mmaccel.pipelines.causal_lm.mtp import MtpHead
from mmaccel.samplers.drafting import in_turn
from mmaccel.samplers.drafting.contract import Drafts, OpenRun
from mmaccel.samplers.drafting.heads.eagle import EagleDrafter
from tests.fixtures.enumerated import draw_enumerated
from tests.fixtures.mtp import open_mtp_model, save_mtp
from tests.fixtures.toy_models import make_prompt
from tests.window.test_eagle import rows_of

pytest.importorskip("transformers.models.mellum")
LENGTH = 20


@pytest.fixture(scope="module", params=["sliding_attention", "full_attention"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("mellum")
    return open_mtp_model(save_mtp(folder, mtp_layer_types=[request.param]))


def decode(
    model: Any,
    policy: Any,
    *,
    n_rows: int = 4,
    branches: int = 1,
    batching: ContinuousBatching | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    vocab_size: int | None = None,
) -> Any:
    window = CausalLMWindow(model, vocab_size=vocab_size)
    window.prefill_chunk_size = chunk
    n_items = n_rows // branches
    return policy.sample(
        window,
        make_prompt(rows_of(n_rows), branches, batching=batching),
        LENGTH,
        params=SamplingParams(temperature=temperature, guidance_scale=1.0 + 0.5 * (branches - 1)),
        noise=Noise.from_seed(list(range(n_items)), n_items),
    )


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"branches": 2},
        {"temperature": 0.0},
        {"chunk": 3},
        {"batching": ContinuousBatching(2), "n_rows": 5},
        {"vocab_size": 38},
    ],
    ids=["", "guidance", "greedy", "chunks", "continuous batching", "fewer ids"],
)
def test_jacobi_has_the_plain_loops_tokens(model: Any, given: dict[str, Any]) -> None:
    plain = decode(model, mmaccel.Autoregressive(), **given)
    found = decode(model, Jacobi(window=5, drafts="mtp"), **given)
    assert torch.equal(found.tokens, plain.tokens)
    assert found.stats.draft_passes > 0


def test_a_model_that_was_cast_drafts(tmp_path: Path) -> None:
    cast = open_mtp_model(save_mtp(tmp_path)).to(torch.bfloat16)
    found = decode(cast, Jacobi(window=4, drafts="mtp"), n_rows=1)
    assert found.stats.draft_passes > 0


# --- which drafts


@torch.no_grad()
def by_hand(model: Any, layers: Any, tokens: list[int], n_drafts: int) -> list[int]:
    """Greedy drafts after `tokens`: transformers' layer over the whole row, for every draft."""
    from transformers.cache_utils import MtpCache

    states = model.model(torch.tensor([tokens[:-1]])).last_hidden_state
    ids = tokens[1:]
    drafts: list[int] = []
    for _ in range(n_drafts):
        found = layers.forward_layer(
            0,
            states,
            torch.arange(1, len(ids) + 1)[None],
            MtpCache(config=layers.config),
            input_ids=torch.tensor([ids]),
        )
        drafts.append(int(layers._project_to_logits(found[0, -1]).argmax()))
        ids = [*ids, drafts[-1]]
        states = torch.cat([states, found[:, -1:]], 1)
    return drafts


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """(tokens before, drafts) of every row and window."""
    found: list[tuple[list[int], list[int]]] = []
    own = EagleDrafter.propose

    def propose(self: EagleDrafter, run: OpenRun) -> Drafts:
        drafts = own(self, run)
        assert drafts.tokens is not None
        for row, tokens in enumerate(run.buffer.tokens):
            end = int(run.buffer.columns[row, 0])
            before = [token for token in tokens[:end].tolist() if token >= 0]
            found.append((before, drafts.tokens[row].tolist()))
        return drafts

    monkeypatch.setattr(EagleDrafter, "propose", propose)
    return found


def share_right(model: Any, drafted: list[tuple[list[int], list[int]]]) -> float:
    from transformers.modeling_layers import MtpModel

    layers = MtpModel.from_pretrained(model).eval()
    right = [
        by_hand(model, layers, before, len(made)) == made
        for before, made in drafted
        if len(before) > 1 and made
    ]
    assert len(right) > 20
    return sum(right) / len(right)


@pytest.mark.parametrize("given", [{}, {"chunk": 3}], ids=["", "chunks"])
def test_drafts_are_those_of_transformers_layer(
    model: Any, given: dict[str, Any], drafted: list[Any]
) -> None:
    decode(model, Jacobi(window=4, drafts="mtp"), temperature=0.0, n_rows=3, **given)
    assert share_right(model, drafted) == 1


PLANTED: dict[str, tuple[object, str, Callable[[Any], Any]]] = {
    "the prompt left out": (EagleDrafter, "read_prompt", lambda own: lambda self, run: None),
    "entries one column late": (
        EagleDrafter,
        "_read",
        lambda own: (
            lambda self, run, states, columns, cache: own(self, run, states, columns + 1, cache)
        ),
    ),
    "a mask that is off by one": (
        MtpHead,
        "_run",
        lambda own: (
            lambda self, tokens, states, columns, cache, mask: own(
                self, tokens, states, columns, cache, None if mask is None else mask.roll(-1, -1)
            )
        ),
    ),
}


@pytest.mark.parametrize("bug", list(PLANTED))
def test_planted_bugs_change_drafts_and_no_token(
    model: Any, bug: str, drafted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, make = PLANTED[bug]
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))
    found = decode(model, Jacobi(window=4, drafts="mtp"), temperature=0.0, n_rows=3)
    assert share_right(model, drafted) < 1
    plain = decode(model, mmaccel.Autoregressive(), temperature=0.0, n_rows=3)
    assert torch.equal(found.tokens, plain.tokens)


def test_the_model_stays_as_it_is(model: Any) -> None:
    before = {name: each.requires_grad for name, each in model.named_parameters()}
    ids = torch.tensor(rows_of(1))
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    with mmaccel.attach(model, mmaccel.Jacobi(window=3, drafts="mtp"), strict=True) as run:
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), plain)
        assert not run.stats.fallbacks
    assert {name: each.requires_grad for name, each in model.named_parameters()} == before
    their = model.generate(ids, max_new_tokens=12, do_sample=False, use_mtp=True)
    assert torch.equal(their, plain)


# --- the distribution, enumerated


def measure(folder: Path) -> float:
    model = open_mtp_model(save_mtp(folder, vocab_size=5))
    return draw_enumerated(model, Speculative(window=3, drafts="mtp"))[0]


def test_speculative_has_the_models_distribution(tmp_path: Path) -> None:
    assert measure(tmp_path) > 1e-4


def test_a_wrong_distribution_of_drafts_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_turn, "draw", lambda chances, coins: chances.argmax(-1))
    assert measure(tmp_path) < 1e-4
