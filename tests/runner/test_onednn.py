"""Weights in oneDNN's order: which products take them, and passes whose bits depend on no width."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import mmaccel
from mmaccel import CausalLMWindow, UnsupportedModelError
from mmaccel.commands import doctor
from mmaccel.contracts import Pass
from mmaccel.pipelines.hosts.causal_lm import self_check
from mmaccel.pipelines.hosts.causal_lm.route import close_forwards
from mmaccel.pipelines.hosts.runner import attention_products, fused_decoder, onednn
from mmaccel.pipelines.hosts.runner.onednn import Products
from mmaccel.pipelines.hosts.runner.own_products import find_own_products, open_own_products
from mmaccel.pipelines.hosts.runner.packed_linear import PackedLinear
from mmaccel.samplers.compare_logits import compare_logits
from tests.fixtures.fused_lms import build_decoder, note_products

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "c"), [(576, 1536), (96, 64)])  # of one row MKL adds 1536 otherwise
def test_a_row_has_the_same_bits_among_any_number(dtype: torch.dtype, n: int, c: int) -> None:
    linears = [nn.Linear(c, n, dtype=dtype).requires_grad_(False) for _ in range(2)]
    product = PackedLinear(linears)
    product.pack()
    product.same_bits = True
    product.reorder({})
    x = torch.randn(300, c, dtype=dtype)
    whole = product(x)
    for rows in (1, 2, 3, 8, 32, 65):
        assert product(x[:rows]).equal(whole[:rows])
    expected = torch.cat([linear(x) for linear in linears], 1)
    torch.testing.assert_close(whole, expected)


def test_a_trial_is_made_once_for_rows_threads_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no more than `_TRIALS` weights of a shape; the faster way runs from then on."""
    monkeypatch.setattr(onednn, "LEAST_BYTES", 0)
    model = build_decoder("llama")
    window = CausalLMWindow(model, fused=True)
    window.reserve(1, 64)
    assert window.forwards.decoder is not None
    products = window.forwards.decoder.products
    tried = products.faster
    products._n_passes.clear()  # of the self-check's passes
    calls: list[int] = []
    own = onednn.multiply
    monkeypatch.setattr(
        onednn, "multiply", lambda x, *rest: (calls.append(len(x)), own(x, *rest))[1]
    )
    monkeypatch.setattr(onednn, "_GAIN", 1e9)  # none is faster
    tokens = torch.ones(1, 3, dtype=torch.int64)
    for _ in range(onednn._UNTRIED):
        window.forward(Pass(tokens, torch.tensor([0])))
    assert not tried  # as many as a prompt or a check has
    for _ in range(2):
        window.forward(Pass(tokens, torch.tensor([0])))
    assert tried == {(torch.get_num_threads(), 4): set()}  # three rows count as four
    n_trials = (onednn._TRIALS + 1) * 5  # shapes
    assert calls == [3] * n_trials
    monkeypatch.setattr(onednn, "_GAIN", 0)  # all are
    calls.clear()
    for _ in range(onednn._UNTRIED + 1):
        window.forward(Pass(tokens[:, :2], torch.tensor([3])))
    assert len(tried[torch.get_num_threads(), 2]) == 5
    assert len(calls) - n_trials == 4 * 2 + 1  # of layers, and the head


@pytest.mark.parametrize(("factor", "faster"), [(1, {(96, 64)}), (1 + 1e-4, set())])
def test_a_way_that_gives_other_numbers_is_not_taken(
    factor: float, faster: set[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a layer with a bias, which both ways add."""
    monkeypatch.setattr(onednn, "_GAIN", 0)
    linear = PackedLinear([nn.Linear(64, 96).requires_grad_(False)])
    multiply = linear.multiply
    monkeypatch.setattr(linear, "multiply", lambda x: factor * multiply(x))
    products = Products([linear], {})
    products.reorder(of_any_size=True)
    assert products.prepare(4, at_once=True) == bool(faster)
    assert products.faster == {onednn.find_key(4): faster}


def test_a_torch_without_the_products_keeps_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "LEAST_BYTES", 0)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    finding = next(each for each in doctor.list_devices() if each.what == "oneDNN")
    assert finding.state == "no" and "oneDNN" in finding.detail
    window = CausalLMWindow(build_decoder("llama"), fused=True)
    window.choose_route()
    decoder = window.forwards.decoder
    assert decoder is not None and not decoder.products.reordered_bytes and not window.route.reason


def test_small_weights_are_laid_out_where_that_is_asked_for_alone() -> None:
    model = build_decoder("llama")
    window = CausalLMWindow(model, fused=True)
    window.choose_route()
    decoder = window.forwards.decoder
    assert decoder is not None and not decoder.products.reordered_bytes
    decoder.use_same_bits(True)
    n_bytes = sum(p.nbytes for name, p in model.named_parameters() if p.ndim == 2)
    assert 0 < decoder.products.reordered_bytes <= n_bytes
    mmaccel.pipelines.hosts.runner.fused_decoder.close_fused(model)
    assert all(packed._reordered is None for packed in decoder.products.linears)


def generate(model: Any, policy: Any, batch: int = 1, fused: Any = "exact", **options: Any) -> Any:
    ids = torch.arange(3 * 12).view(3, 12)[:batch] % 38 + 1
    given: dict[str, Any] = dict(max_new_tokens=24, do_sample=True, pad_token_id=0) | options
    with mmaccel.attach(model, policy, fused=fused, seed=3) as handle:
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
    return tokens, handle.stats


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", torch.float32), ("gemma3", torch.bfloat16), ("gpt2", torch.bfloat16)],
)
def test_a_run_is_bitwise_in_any_dtype(name: str, dtype: torch.dtype) -> None:
    model = build_decoder(name, dtype)
    own, stats = generate(model, mmaccel.Autoregressive(), eos_token_id=None)
    assert (stats.exactness, stats.dtype) == ("bitwise", str(dtype).removeprefix("torch."))
    for window, batch in ((2, 1), (5, 2), (16, 3)):
        made, stats = generate(model, mmaccel.Jacobi(window), batch, eos_token_id=None)
        assert made[:1].equal(own) and stats.exactness == "bitwise"
        assert stats.route == "fused"
    stats = generate(model, mmaccel.Jacobi(4), fused="auto")[1]
    assert stats.exactness == ("bitwise" if dtype == torch.float32 else "up to rounding")


def test_logits_have_the_same_bits_behind_a_long_prompt() -> None:
    """Where values of more positions are added than in a block, in passes that end elsewhere."""
    model = build_decoder("llama", torch.float32)
    model.config.max_position_embeddings = 1024
    window = CausalLMWindow(model, fused="exact")
    ids = torch.randint(40, (2, 640), generator=torch.Generator().manual_seed(0))

    def process(rows: int, width: int) -> torch.Tensor:
        window.reserve(rows, 640)
        window.forward(Pass(ids[:rows, :600], torch.zeros(rows, dtype=torch.int64)))
        starts = range(600, 640, width)
        made = [
            window.forward(Pass(ids[:rows, k : k + width], torch.full((rows,), k))) for k in starts
        ]
        return torch.cat(made, 1)[0]

    expected = process(1, 40)
    assert all(process(*shape).equal(expected) for shape in ((1, 1), (1, 8), (2, 4), (2, 40)))


@pytest.mark.parametrize("fault", ["attention", "a row alone", "blocks"])
def test_other_bits_are_found_and_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "HISTORY", 420)
    model = build_decoder("llama", torch.float32)
    model.config.max_position_embeddings = 1024
    if fault == "attention":
        monkeypatch.setattr(attention_products, "_LEAST_ROWS", 1)
    elif fault == "blocks":
        same = attention_products.attend_with_same_bits

        def divide(*given: Any) -> torch.Tensor:
            """Sums that are divided by the length, as some CPUs' libraries divide long ones."""
            monkeypatch.setattr(attention_products, "_BLOCK", given[2].shape[2] // 2 + 1)
            return same(*given)

        monkeypatch.setattr(fused_decoder, "attend_with_same_bits", divide)
    else:
        own = PackedLinear.multiply_reordered
        monkeypatch.setattr(
            PackedLinear, "multiply_reordered",
            lambda product, x: own(product, x) * (1 + 1e-6 * (len(x) == 2 and x[0].equal(x[1]))),
        )  # fmt: skip
    with pytest.raises(
        UnsupportedModelError, match=r"other bits of .*(attention|input).* of layer"
    ):
        generate(model, "jacobi")


def test_runs_that_attend_otherwise_are_not_called_bitwise() -> None:
    model = build_decoder("llama", torch.bfloat16)
    stats = generate(model, mmaccel.Jacobi(4), batch=1, num_return_sequences=2)[1]
    assert stats.exactness == "bitwise"
    ids = torch.ones(1, 12, dtype=torch.int64)
    with mmaccel.attach(model, mmaccel.Jacobi(4), fused="exact", share_prefix=True) as handle:
        model.generate(
            ids, max_new_tokens=6, num_return_sequences=2, do_sample=True, pad_token_id=0
        )
    assert handle.stats is not None and handle.stats.exactness == "up to rounding"
    for given in (
        {"kv_cache": mmaccel.SnapKV(budget=8, window=4)},
        {"attention": mmaccel.Quest(0.5)},
    ):
        with mmaccel.attach(model, mmaccel.Jacobi(4), fused="exact", **given) as handle:
            model.generate(ids, max_new_tokens=6, pad_token_id=0)
        assert handle.stats is not None and handle.stats.exactness in ("up to rounding", "relaxed")
    asked = {"output_hidden_states": True, "return_dict_in_generate": True}
    stats = generate(model, mmaccel.Jacobi(4), **asked)[1]
    assert (stats.route, stats.exactness) == ("model", "up to rounding")


def test_a_model_that_is_not_fused_takes_them_in_its_own_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With adapters; inside its passes alone, and after a weight that changed, too."""
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(onednn, "LEAST_BYTES", 0)
    monkeypatch.setattr(onednn, "_GAIN", 0)
    rows = note_products(monkeypatch)
    model = build_decoder("llama", torch.bfloat16)
    adapter = peft.LoraConfig(target_modules=["v_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(adapter, model)
    own, window = CausalLMWindow(model), CausalLMWindow(model, fused="auto")
    n_linears = sum(type(module) is nn.Linear for module in model.modules())
    ids = torch.arange(24).view(2, 12) % 38 + 1
    for factor in (1, 1.5):
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.base_layer.weight *= factor
        for each in (own, window):
            each.reserve(2, 12)
        for _ in range(onednn._UNTRIED + 2):
            rows.clear()
            made = [x.forward(Pass(ids, torch.zeros(2, dtype=torch.int64))) for x in (own, window)]
            assert compare_logits(*made).mean < 0.03
        assert rows == [24] * n_linears and not own.route.reason.endswith("oneDNN")
        assert not any("forward" in vars(module) for module in model.modules())
    assert (window.route.name, window.forwards.same_bits) == ("model", False)
    assert re.search("v_proj, a peft.*; 0 MB of weights once more for oneDNN", window.route.reason)
    with pytest.raises(IndexError):  # a pass that fails
        window.forward(Pass(ids + 1000, torch.zeros(2, dtype=torch.int64)))
    assert not any("forward" in vars(module) for module in model.modules())
    assert (found := open_own_products(model)) is not None
    close_forwards(model)
    assert all(linear._reordered is None for linear in found.products.linears)


def test_own_forwards_that_something_wraps_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "LEAST_BYTES", 0)
    model = build_decoder("llama", torch.float32)
    assert (found := open_own_products(model)) is not None
    model.to(torch.bfloat16)
    assert (cast := open_own_products(model)) is not None and cast.dtype == torch.bfloat16
    assert all(linear._reordered is None for linear in found.products.linears)
    linear = model.model.layers[0].mlp.up_proj
    linear.forward = lambda x: x
    assert (found := open_own_products(model)) is not None and linear not in found.linears
    model.model.layers[1].compile()
    assert open_own_products(model) is None and find_own_products(model) is None
    monkeypatch.setattr(onednn, "LEAST_BYTES", 64 << 20)
    assert open_own_products(build_decoder("llama")) is None
