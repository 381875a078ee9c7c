"""EAGLE drafts: tokens and distribution are the plain loop's, drafts are those of the head."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import mmaccel
from mmaccel import CausalLMWindow, ContinuousBatching, Jacobi, Noise, SamplingParams, Speculative
from mmaccel.samplers.drafting import in_turn
from mmaccel.samplers.drafting.contract import Drafts, OpenRun
from mmaccel.samplers.drafting.heads import eagle
from mmaccel.samplers.drafting.heads.eagle import Eagle, EagleDrafter
from mmaccel.samplers.drafting.heads.eagle_model import (
    FOLDER,
    EagleConfig,
    EagleModel,
    load_eagle,
    save_eagle,
)
from tests.fixtures.enumerated import draw_enumerated
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import make_prompt

WEIGHTS, CONFIG = FOLDER.weights, FOLDER.config
LENGTHS = (12, 5, 9, 1)
LENGTH = 20
LAYERS = (0, 1, 1)  # of the two of the tiny models


def make_head(model: Any, folder: Path, *, third: bool, seed: int = 3, n_ids: int = 0) -> Path:
    """A folder with a random head for a model; an EAGLE 3 head scores `n_ids` tokens."""
    torch.manual_seed(seed)
    embedding = model.get_input_embeddings().weight
    vocab_size, width = embedding.shape
    config = EagleConfig(
        vocab_size=vocab_size,
        draft_vocab_size=n_ids or vocab_size,
        hidden_size=width,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        features=width * (len(LAYERS) if third else 1),
        aux_layers=LAYERS if third else (),
    )
    head = EagleModel(config, embedding, model.get_output_embeddings().weight)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.25)
    if n_ids:
        head.targets = torch.randperm(vocab_size)[:n_ids].sort().values
    save_eagle(head, folder, {})
    if not third:  # the layout of EAGLE 1
        tensors = {k: v for k, v in load_file(folder / WEIGHTS).items() if k != "d2t"}
        renamed = {k.replace("midlayer", "layers.0"): v for k, v in tensors.items()}
        save_file(renamed, folder / WEIGHTS)
    return folder


@pytest.fixture(params=[False, True], ids=["eagle", "eagle3"])
def head(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_head(build_lm("llama"), tmp_path / "head", third=request.param)


@cache
def rows_of(n_rows: int) -> list[list[int]]:
    draws = torch.Generator().manual_seed(0)
    sizes = (LENGTHS * 2)[:n_rows]
    return [torch.randint(2, 40, (size,), generator=draws).tolist() for size in sizes]


def decode(
    policy: Any,
    *,
    model: Any = None,
    n_rows: int = 4,
    branches: int = 1,
    batching: ContinuousBatching | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    **options: Any,
) -> Any:
    window = CausalLMWindow(build_lm("llama") if model is None else model, **options)
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
        {"fused": True},
        {"branches": 2},
        {"temperature": 0.0},
        {"chunk": 3},
        {"batching": ContinuousBatching(2), "n_rows": 5},
    ],
    ids=["", "fused", "guidance", "greedy", "chunks", "continuous batching"],
)
def test_jacobi_has_the_plain_loops_tokens(head: Path, given: dict[str, Any]) -> None:
    plain = decode(mmaccel.Autoregressive(), **given)
    found = decode(Jacobi(window=5, drafts=Eagle(str(head))), **given)
    assert torch.equal(found.tokens, plain.tokens)
    assert found.stats.draft_passes > 0


# --- which drafts


def by_hand(model: Any, head: EagleModel, tokens: Tensor, n_drafts: int) -> list[int]:
    """Greedy drafts after `tokens` `[T]`: every entry of the row anew, for every draft."""
    with torch.no_grad():
        output = model.model(tokens[None, :-1], output_hidden_states=True)
    layers = head.config.aux_layers
    states = output.last_hidden_state
    if layers:
        states = torch.cat([output.hidden_states[layer] for layer in layers], -1)
    entered = head.enter(states)  # [1, T-1, C]
    drafts: list[int] = []
    for _ in range(n_drafts):
        after = tokens[1:][None]
        columns = torch.arange(after.shape[1])[None]
        cache = head.empty_cache(1, after.shape[1])._replace(first=torch.zeros(1, dtype=torch.long))
        found = head(after, entered, columns, cache)[:, -1:]
        drafts.append(int(head.logits(found)[0, 0].argmax()))
        tokens = torch.cat([tokens, tokens.new_tensor(drafts[-1:])])
        entered = torch.cat([entered, found], 1)
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


def count_right(drafted: list[tuple[list[int], list[int]]], folder: Path) -> float:
    """The share of windows whose drafts are those of `by_hand`."""
    model = build_lm("llama")
    head = load_eagle(
        folder,
        embedding=model.get_input_embeddings().weight,
        output=model.get_output_embeddings().weight,
        n_layers=2,
    )
    is_right = []
    for before, drafts in drafted:
        if len(before) > 1:  # nothing is known of one token
            wanted = by_hand(model, head, torch.tensor(before), len(drafts))
            is_right.append(wanted == drafts)
    assert len(is_right) > 20
    return sum(is_right) / len(is_right)


@pytest.mark.parametrize("given", [{}, {"fused": True}, {"chunk": 3}], ids=["", "fused", "chunks"])
def test_drafts_are_those_of_the_head_over_the_whole_row(
    head: Path, given: dict[str, Any], drafted: list[Any]
) -> None:
    decode(Jacobi(window=4, drafts=Eagle(str(head))), temperature=0.0, n_rows=3, **given)
    assert count_right(drafted, head) == 1


PLANTED: dict[str, tuple[object, str, Callable[[Any], Any]]] = {
    "states of the prompt left out": (
        EagleDrafter,
        "read_prompt",
        lambda own: lambda self, run: None,
    ),
    "the state of the window's last entry": (
        eagle,
        "_choose",
        lambda own: (
            lambda after, index, is_new, state: own(
                after, torch.full_like(index, after.shape[1] - 1), is_new, state
            )
        ),
    ),
    "entries one column late": (
        EagleDrafter,
        "_read",
        lambda own: (
            lambda self, run, states, columns, cache: own(self, run, states, columns + 1, cache)
        ),
    ),
}


@pytest.mark.parametrize("bug", list(PLANTED))
def test_planted_bugs_change_drafts_and_no_token(
    bug: str, head: Path, drafted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, make = PLANTED[bug]
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))
    found = decode(Jacobi(window=4, drafts=Eagle(str(head))), temperature=0.0, n_rows=3)
    assert count_right(drafted, head) < 1
    plain = decode(mmaccel.Autoregressive(), temperature=0.0, n_rows=3)
    assert torch.equal(found.tokens, plain.tokens)


def test_a_head_with_fewer_tokens_scores_those_alone(tmp_path: Path, drafted: list[Any]) -> None:
    folder = make_head(build_lm("llama"), tmp_path, third=True, n_ids=11)
    offsets = load_file(folder / WEIGHTS)["d2t"]
    known = set((torch.arange(11) + offsets).tolist())
    plain = decode(mmaccel.Autoregressive())
    found = decode(Jacobi(window=4, drafts=Eagle(str(folder))))
    assert torch.equal(found.tokens, plain.tokens)
    assert {token for _, drafts in drafted for token in drafts} <= known
    assert len(known) == 11


# --- the distribution, enumerated


def measure(folder: Path, policy: Any = None) -> float:
    model = build_lm("llama", vocab_size=5)
    make_head(model, folder, third=True)
    policy = policy or Speculative(window=3, drafts=Eagle(str(folder)))
    p_value, stats = draw_enumerated(model, policy)
    assert stats.passes < 3 * stats.draft_passes
    return p_value


def test_speculative_has_the_models_distribution(tmp_path: Path) -> None:
    assert measure(tmp_path) > 1e-4


def test_a_wrong_distribution_of_drafts_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_turn, "draw", lambda chances, coins: chances.argmax(-1))
    assert measure(tmp_path) < 1e-4


# --- the file


def test_the_layout_is_that_of_the_authors(head: Path) -> None:
    names = set(load_file(head / WEIGHTS))
    is_third = "midlayer.hidden_norm.weight" in names
    prefix = "midlayer" if is_third else "layers.0"
    assert {f"{prefix}.self_attn.q_proj.weight", f"{prefix}.mlp.up_proj.weight"} < names
    assert ("fc.bias" in names) != is_third and ("lm_head.weight" in names) == is_third
    config = json.loads((head / CONFIG).read_text(encoding="utf-8"))
    assert config["eagle_aux_hidden_state_layer_ids"] == (list(LAYERS) if is_third else [])


def test_a_run_that_has_ended_keeps_no_states(head: Path) -> None:
    window = CausalLMWindow(build_lm("llama"))
    given: dict[str, Any] = {"params": SamplingParams(), "noise": Noise.from_seed(0, 1)}
    Jacobi(window=4, drafts=Eagle(str(head))).sample(window, make_prompt([[5, 6]]), 6, **given)
    assert not window.keeps_states and window.read_prompt is None


def test_attach_takes_a_head(head: Path) -> None:
    model = build_lm("llama")
    ids = torch.tensor(rows_of(1))
    made = []
    for policy in (mmaccel.Autoregressive(), Jacobi(window=4, drafts=eagle.Eagle(str(head)))):
        with mmaccel.attach(model, policy, strict=True) as run:
            torch.manual_seed(3)
            made.append(model.generate(ids, max_new_tokens=12, do_sample=True))
            assert not run.stats.fallbacks
    assert torch.equal(*made)
