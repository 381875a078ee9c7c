"""DFlash drafts: those of transformers' class, in both layouts; tokens stay the plain loop's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mmaccel
from mmaccel import CausalLMWindow, ContinuousBatching, Jacobi, Noise, SamplingParams, Speculative
from mmaccel.pipelines.transformers_release import CACHE
from mmaccel.samplers.drafting import in_turn
from mmaccel.samplers.drafting.contract import Drafts, OpenRun
from mmaccel.samplers.drafting.parallel.dflash import DFlash, DFlashDrafter
from mmaccel.samplers.drafting.parallel.dflash_model import DFlashModel
from tests.fixtures.enumerated import draw_enumerated
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import make_prompt

pytest.importorskip("transformers.models.muse_glimmer_assistant")

LENGTHS = (12, 5, 9, 1)
LENGTH = 20
BLOCK = 5
SPAN = 4
MASK = 39
TARGETS = [1, 0]  # layers of the three, in this order
FULL = ["full_attention", "full_attention"]
KINDS = {
    "full": FULL,
    "sliding": ["sliding_attention", "full_attention"],
    "authors": FULL,
    "authors, sliding": ["sliding_attention", "full_attention"],
}


def build_target(**changes: Any) -> Any:
    return build_lm("llama", num_hidden_layers=3, **changes)


def build_draft(kind: str, mask: int = MASK) -> Any:
    """transformers' own class, random weights."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    config = MuseGlimmerAssistantConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, block_size=BLOCK, mask_token_id=mask,
        target_layer_ids=TARGETS, layer_types=KINDS[kind], sliding_window=SPAN,
    )  # fmt: skip
    torch.manual_seed(3)
    model = MuseGlimmerAssistantModel(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return model


def save_draft(kind: str, folder: Path, mask: int = MASK) -> Path:
    """A folder as transformers writes it, or as the authors' repository has it."""
    build_draft(kind, mask).save_pretrained(folder)
    if kind.startswith("authors"):
        names = {"encoder.fc": "fc", "encoder.output_norm_enc": "hidden_norm"}
        tensors = {}
        for name, value in load_file(folder / "model.safetensors").items():
            short = name.removesuffix(".weight")
            tensors[names.get(short, short) + ".weight"] = value
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        own = {name: config.pop(name) for name in ("mask_token_id", "target_layer_ids")}
        config |= {"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}
        config["dflash_config"] = own
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def rows_of(n_rows: int) -> list[list[int]]:
    draws = torch.Generator().manual_seed(0)
    sizes = (LENGTHS * 2)[:n_rows]
    return [torch.randint(2, 39, (size,), generator=draws).tolist() for size in sizes]


def decode(
    policy: Any,
    *,
    n_rows: int = 4,
    branches: int = 1,
    batching: ContinuousBatching | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    **options: Any,
) -> Any:
    window = CausalLMWindow(build_target(), **options)
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
def test_jacobi_has_the_plain_loops_tokens(tmp_path: Path, given: dict[str, Any]) -> None:
    folder = save_draft("sliding", tmp_path)
    plain = decode(mmaccel.Autoregressive(), **given)
    found = decode(Jacobi(window=5, drafts=DFlash(str(folder))), **given)
    assert torch.equal(found.tokens, plain.tokens)
    assert 0 < found.stats.draft_passes <= found.stats.passes


# --- which drafts


@torch.no_grad()
def by_hand(kind: str, tokens: list[int], n_drafts: int) -> list[int]:
    """Greedy drafts behind `tokens`: transformers' class over the whole row anew, without cache."""
    target = build_target()
    draft = build_draft(kind)
    ids = torch.tensor([tokens])
    seen = target.model(ids[:, :-1], output_hidden_states=True).hidden_states
    context = torch.cat([seen[layer + 1] for layer in TARGETS], -1)
    noise = torch.tensor([[tokens[-1]] + [MASK] * (BLOCK - 1)])
    n_known = len(tokens) - 1
    columns = torch.arange(n_known + BLOCK)[None]
    masks: Any = None
    if kind == "authors, sliding":  # which sees nothing behind, and one entry less
        behind = columns - columns[:, n_known:].mT
        hidden = (behind > 0) | (behind <= -SPAN)
        masks = {
            "sliding_attention": torch.zeros(1, 1, *hidden.shape).masked_fill(hidden, -1e9),
            "full_attention": None,
        }
    from transformers.cache_utils import DFlashCache

    cache = DFlashCache(config=draft.config)
    cache.set_previous_accepted_tokens(n_known)
    states = draft(
        noise_embeds=target.get_input_embeddings()(noise),
        context_hidden_states=context,
        position_ids=columns,
        attention_mask=masks,
        **{CACHE: cache},
    ).last_hidden_state
    found: list[int] = target.lm_head(states[0, 1 : n_drafts + 1]).argmax(-1).tolist()
    return found


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """(tokens before, drafts) of every row and window."""
    found: list[tuple[list[int], list[int]]] = []
    own = DFlashDrafter.propose

    def propose(self: DFlashDrafter, run: OpenRun) -> Drafts:
        drafts = own(self, run)
        assert drafts.tokens is not None
        for row, tokens in enumerate(run.buffer.tokens):
            end = int(run.buffer.columns[row, 0])
            before = [token for token in tokens[:end].tolist() if token >= 0]
            if not run.rows.ended[row] and drafts.tokens.shape[1]:
                found.append((before, drafts.tokens[row].tolist()))
        return drafts

    monkeypatch.setattr(DFlashDrafter, "propose", propose)
    return found


def share_right(drafted: list[tuple[list[int], list[int]]], kind: str) -> float:
    is_right = [
        by_hand(kind, before, len(made)) == made for before, made in drafted if len(before) > 1
    ]
    assert len(is_right) > 15
    return sum(is_right) / len(is_right)


@pytest.mark.parametrize(
    ("kind", "given"),
    [*((kind, {}) for kind in KINDS), ("full", {"fused": True}), ("full", {"chunk": 3})],
    ids=[*KINDS, "fused", "chunks"],
)
def test_drafts_are_those_of_the_network_over_the_whole_row(
    kind: str, tmp_path: Path, given: dict[str, Any], drafted: list[Any]
) -> None:
    folder = save_draft(kind, tmp_path)
    decode(Jacobi(window=4, drafts=DFlash(str(folder))), temperature=0.0, n_rows=3, **given)
    assert share_right(drafted, kind) == 1


PLANTED: dict[str, tuple[object, str, Callable[[Any], Any]]] = {
    "states of the prompt left out": (
        DFlashDrafter,
        "read_prompt",
        lambda own: lambda self, run: None,
    ),
    "states one column late": (
        DFlashDrafter,
        "_read",
        lambda own: (
            lambda self, run, states, columns, cache: own(self, run, states, columns + 1, cache)
        ),
    ),
    "the block one column early": (
        DFlashModel,
        "forward",
        lambda own: lambda self, last, columns, cache: own(self, last, columns - 1, cache),
    ),
}


@pytest.mark.parametrize("bug", list(PLANTED))
def test_planted_bugs_change_drafts_and_no_token(
    bug: str, tmp_path: Path, drafted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, make = PLANTED[bug]
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))
    folder = save_draft("full", tmp_path)
    found = decode(Jacobi(window=4, drafts=DFlash(str(folder))), temperature=0.0, n_rows=3)
    assert share_right(drafted, "full") < 1
    plain = decode(mmaccel.Autoregressive(), temperature=0.0, n_rows=3)
    assert torch.equal(found.tokens, plain.tokens)


def test_attach_takes_a_network(tmp_path: Path) -> None:
    model = build_target()
    policy = Jacobi(window=4, drafts=DFlash(save_draft("full", tmp_path)))  # type: ignore[arg-type]
    ids = torch.tensor(rows_of(1))
    made = []
    for each in (mmaccel.Autoregressive(), policy):
        with mmaccel.attach(model, each, strict=True, seed=3):
            made.append(model.generate(ids, max_new_tokens=12, do_sample=True))
    assert torch.equal(*made)


# --- the distribution, enumerated


def measure(folder: Path) -> float:
    save_draft("full", folder, mask=4)
    policy = Speculative(window=3, drafts=DFlash(str(folder)))
    return draw_enumerated(build_target(vocab_size=5), policy)[0]


def test_speculative_has_the_models_distribution(tmp_path: Path) -> None:
    assert measure(tmp_path) > 1e-4


def test_a_wrong_distribution_of_drafts_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_turn, "draw", lambda chances, coins: chances.argmax(-1))
    assert measure(tmp_path) < 1e-4
