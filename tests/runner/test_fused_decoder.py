"""The fused decoder: the model's own logits, over the model's own storage, in few operations."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import mmaccel
from mmaccel import CausalLMWindow
from mmaccel.contracts import Pass
from mmaccel.pipelines.hosts.causal_lm import route
from mmaccel.pipelines.hosts.causal_lm.image_vocabulary import ImageTokenWindow
from mmaccel.pipelines.hosts.runner import fused_decoder, packed_linear
from mmaccel.pipelines.hosts.runner.packed_linear import PackedLinear
from mmaccel.pipelines.models.glm_image import GlmImageWindow
from mmaccel.samplers.compare_logits import Difference, compare_logits
from tests.fixtures.fused_lms import RECOGNISED, UNRECOGNISED, are_apart, build_decoder, lay_out_all
from tests.fixtures.toy_models import make_prompt
from tests.fixtures.windows import build_janus, build_model

PASSES = (((0, 0), 9), ((9, 4), 4), ((6, 11), 7), ((13, 2), 1))  # ragged rows; some roll back
N_IDS = 40


def run_passes(window: CausalLMWindow) -> list[Tensor]:
    """Logits `[2, W, V]` of every pass of `PASSES`."""
    ids = torch.randint(N_IDS, (2, 20), generator=torch.Generator().manual_seed(1))
    window.reserve(2, 20)
    logits = []
    for starts, width in PASSES:
        start = torch.tensor(starts)
        logits.append(
            window.forward(Pass(ids.gather(1, start[:, None] + torch.arange(width)), start))
        )
    return logits


def find_differences(own: CausalLMWindow, fused: CausalLMWindow) -> list[Difference]:
    """How the two routes' logits differ, pass by pass."""
    pairs = list(zip(run_passes(own), run_passes(fused)))
    assert (own.route.name, fused.route.name) == ("model", "fused")
    decoder = fused.forwards.decoder
    assert decoder is not None
    assert bool(fused.route.reason) == bool(decoder.products.reordered_bytes)
    found = [compare_logits(*pair) for pair in pairs]
    assert all(difference.is_telling for difference in found)
    return found


def find_difference(model: Any, make: Callable[[Any], CausalLMWindow] = CausalLMWindow) -> float:
    """The largest of them, in standard deviations."""
    own, fused = make(model), make(model)
    fused.setup.fused = True
    return max(difference.largest for difference in find_differences(own, fused))


WAYS: dict[str, tuple[torch.dtype, Any]] = {  # dtype, attention of the fused decoder
    "float32": (torch.float32, "auto"),
    "float64": (torch.float64, "auto"),  # its norms are float32
    "bfloat16": (torch.bfloat16, "auto"),
    # passes without masks, as on a GPU: sliding windows and softcaps are the kernel's
    "window attention": (torch.float32, "kernel"),
    "oneDNN": (torch.float32, "auto"),  # weights in its order, at any number of rows
    "oneDNN, bfloat16": (torch.bfloat16, "auto"),
}
SOME = {
    "float64": ("llama", "gemma3", "gpt2", "gpt_neox", "opt"),
    "bfloat16": ("llama", "gemma3", "gpt2", "gpt_neox", "opt"),
    "oneDNN": ("llama with biases", "gemma3", "gpt2", "gpt_neox", "opt"),
    "oneDNN, bfloat16": ("llama", "gemma3", "gpt2"),
    "window attention": (
        "llama", "qwen2", "gemma3", "gemma2, capped", "gpt2", "gpt_neox", "opt",
    ),
}  # fmt: skip
CELLS = [(name, way) for way in WAYS for name in SOME.get(way, RECOGNISED)]


@pytest.mark.parametrize(("name", "way"), CELLS)
def test_logits_are_the_models_own(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ragged rows, some of which roll back; half types differ no more than they round."""
    dtype, attention = WAYS[way]
    if "oneDNN" in way:
        lay_out_all(monkeypatch)
    model = build_decoder(name, dtype)
    fused = CausalLMWindow(model, attention=attention, fused=True)
    found = find_differences(CausalLMWindow(model), fused)
    decoder = fused.forwards.decoder
    assert decoder is not None and (decoder.products.reordered_bytes > 0) == ("oneDNN" in way)
    if dtype == torch.bfloat16:
        assert max(difference.mean for difference in found) < 0.03
    else:
        assert max(difference.largest for difference in found) < 1e-5
    assert (fused.attention_reason == "") == (attention == "kernel")


@pytest.mark.parametrize("kind", ["llama3", "dynamic", "axes", "none"])
def test_tables_are_of_angles_that_only_a_position_decides(kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "factor": 2.0, "rope_theta": 10_000.0}
    if kind == "llama3":
        rope |= dict(low_freq_factor=1.0, high_freq_factor=4.0)
        rope |= {"original_max_position_embeddings": 32}
    if kind == "axes":
        window: CausalLMWindow = GlmImageWindow(build_model("glm_image"))
    else:
        changes = {} if kind == "none" else {"rope_parameters": rope}
        window = CausalLMWindow(build_decoder("gpt2" if kind == "none" else "llama", **changes))
    window.setup.fused = True
    window.reserve(2, 20)
    assert window.route.name == "fused" and (window.tables is not None) == (kind == "llama3")


def test_image_models_of_other_heads() -> None:
    """Their text is not served, as their heads mask ids; their image tokens are."""
    assert find_difference(build_model("glm_image"), GlmImageWindow) < 1e-5
    for name in ("chameleon", "chameleon, norms after", "emu3", "lumina"):
        model = build_model(name)
        for own, parameter in model.get_decoder().named_parameters():
            if "q_norm" in own or "k_norm" in own:  # they begin as ones and zeros
                parameter.data += 0.2 * torch.randn_like(parameter)

        def make(model: Any) -> CausalLMWindow:
            window = ImageTokenWindow(model, list(range(10, 22)))
            window.begin(make_prompt([[1, 2, 3], [4, 5, 6]]))
            return window

        assert find_difference(model, make) < 1e-5
    window = CausalLMWindow(build_model("chameleon"), fused="auto")
    window.choose_route()
    assert window.route.name == "model" and "head masks the ids of images" in window.route.reason
    assert find_difference(build_janus()) < 1e-5


@pytest.mark.parametrize("name", UNRECOGNISED)
def test_an_unknown_layer_keeps_its_own_forward(name: str) -> None:
    window = CausalLMWindow(build_decoder(name), fused="auto")
    run_passes(window)
    assert window.route.name == "model" and UNRECOGNISED[name][2] in window.route.reason


def packed(model: Any) -> list[nn.Parameter]:
    layer = model.get_decoder().layers[1]
    linears = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    if hasattr(layer, "mlp"):
        linears += [layer.mlp.gate_proj, layer.mlp.up_proj]
    return [*(one.weight for one in linears), *(one.bias for one in linears)]


def storages(parameters: list[nn.Parameter]) -> list[int]:
    return [parameter.untyped_storage().data_ptr() for parameter in parameters]


@pytest.mark.parametrize(("name", "n_packed"), [("llama with biases", 4), ("opt", 2)])
def test_packed_weights_are_the_models_own_storage(
    name: str, n_packed: int, tmp_path: Path
) -> None:
    """Storage is shared while attached, with no byte more; it is restored by `detach`."""
    from safetensors.torch import load_file, save_file

    model = build_decoder(name, tie_word_embeddings=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = packed(model)
    n_bytes = sum(parameter.nbytes for parameter in parameters)
    model.save_pretrained(tmp_path / "before")
    with mmaccel.attach(model, "jacobi", fused=True):
        assert packed(model)[0] is parameters[0]
        assert len(set(storages(parameters))) == n_packed  # weights, biases of qkv, gate and up
        sizes = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
        assert sum(sizes.values()) == n_bytes
        model.save_pretrained(tmp_path / "attached")
        save_file(model.state_dict(), tmp_path / "state.safetensors")
    model.save_pretrained(tmp_path / "after")
    assert len(set(storages(parameters))) == len(parameters)
    assert are_apart(parameters)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    files = [tmp_path / name / "model.safetensors" for name in ("before", "attached", "after")]
    assert len({file.read_bytes() for file in files}) == 1
    loaded = load_file(tmp_path / "state.safetensors")
    assert loaded.keys() == before.keys() and all(v.equal(before[k]) for k, v in loaded.items())


def save_by_accelerate(model: Any, folder: Path) -> Path:
    from accelerate import Accelerator

    Accelerator().save_model(model, folder)
    return folder / "model.safetensors"


def save_by_safetensors(model: Any, folder: Path) -> Path:
    from safetensors.torch import save_model

    save_model(model, folder / "whole.safetensors")
    return folder / "whole.safetensors"


@pytest.mark.parametrize("save", [save_by_accelerate, save_by_safetensors])
def test_what_drops_tied_weights_saves_all_packed_ones(
    save: Callable[[Any, Path], Path], tmp_path: Path
) -> None:
    """Both take tensors of one storage for one weight."""
    from safetensors.torch import load_file

    model = build_decoder("llama with biases", tie_word_embeddings=False)
    with mmaccel.attach(model, "jacobi", fused=True):
        state = model.state_dict()
        loaded = load_file(save(model, tmp_path))
        own = model.get_decoder().layers[0].self_attn.k_proj
        own.weight.data[0, 0] = 7.0  # what `state_dict` gives out is the model's own memory
        assert state["model.layers.0.self_attn.k_proj.weight"][0, 0] == 7.0
        own.weight.data[0, 0] = loaded["model.layers.0.self_attn.k_proj.weight"][0, 0]
    assert loaded.keys() == model.state_dict().keys()
    assert all(value.equal(loaded[name]) for name, value in model.state_dict().items())
    assert not any(module._state_dict_hooks for module in model.modules())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), KeyboardInterrupt()])
def test_packing_that_ends_midway_leaves_nothing_packed(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls, own = build_decoder("llama"), [0], packed_linear._pack

    def fail_late(parameters: Any) -> int:
        calls[0] += 1
        if calls[0] == 3:
            raise error
        return own(parameters)

    monkeypatch.setattr(packed_linear, "_pack", fail_late)
    window = CausalLMWindow(model, fused="auto")
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            window.choose_route()
    else:
        window.choose_route()
        assert window.route.name == "model" and "no memory" in window.route.reason
    assert calls[0] == 3
    assert are_apart(model.parameters())
    window.choose_route()  # there is memory again
    assert window.route.name == "fused"


def test_a_prompt_after_a_pass_that_failed_is_processed_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the attention kernel was told of the failed pass is forgotten."""
    model, ids = build_decoder("llama"), torch.randint(N_IDS, (2, 9))
    start = torch.zeros(2, dtype=torch.int64)

    def process(window: CausalLMWindow) -> list[tuple[Tensor, Tensor]]:
        window.reserve(2, 20)
        window.prefill(Pass(ids[:, :8], start))
        return window.run_caches().read(torch.arange(8).expand(2, 8))

    window = CausalLMWindow(model, attention="kernel", fused=True)
    expected = process(window)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):

        def fail(*given: Any) -> Tensor:
            raise torch.OutOfMemoryError("no memory")

        patch.setattr(window.forwards.decoder, "logits", fail)
        window.forward(Pass(ids[:, 8:], start + 8))
    for own, received in zip(expected, process(window)):
        assert torch.equal(own[0], received[0]) and torch.equal(own[1], received[1])


def move_to_half(model: Any) -> None:
    model.half()


def move_to_meta(model: Any) -> None:
    model.to("meta")


def assign_others(model: Any) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


@pytest.mark.parametrize("change", [move_to_half, move_to_meta, assign_others])
def test_a_model_that_moves_while_packed_frees_what_was_packed(
    change: Callable[[Any], None],
) -> None:
    """The parameters alone hold the packed tensors: not the handle, nor what it decodes by."""
    model = build_decoder("llama with biases")
    with mmaccel.attach(model, mmaccel.Jacobi(4)) as handle:
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, pad_token_id=0)
        assert handle.stats is not None and handle.stats.route == "fused"
        left = [StorageWeakRef(parameter.untyped_storage()) for parameter in packed(model)]
        assert not any(one.expired() for one in left)
        change(model)
        gc.collect()
        assert all(one.expired() for one in left)
    assert are_apart(p for p in packed(model) if not p.is_meta)


def test_a_model_that_is_attached_again_is_not_checked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`detach` remembers what was found, `reset` forgets it, and a change is noticed."""
    checks: list[Any] = []
    own = route.check_fused

    def count(plain: CausalLMWindow, decoder: Any) -> str:
        checks.append(decoder)
        return own(plain, decoder)

    monkeypatch.setattr(route, "check_fused", count)
    model, prompt = build_decoder("llama"), torch.tensor([[5, 6, 7]])

    def generate(**options: Any) -> None:
        with mmaccel.attach(model, mmaccel.Jacobi(4), **options) as handle:
            model.generate(prompt, max_new_tokens=3, pad_token_id=0)
            assert handle.stats is not None and handle.stats.route == "fused"
            if options:
                handle.reset()

    generate()
    generate()
    assert len(checks) == 1
    assert packed(model)[0].untyped_storage().nbytes() == packed(model)[0].nbytes
    generate(fused=True)
    generate()
    assert len(checks) == 2  # after the reset
    change_a_norm(model)
    generate()
    assert len(checks) == 3


def test_a_handle_may_leave_the_weights_packed() -> None:
    model = build_decoder("llama with biases")
    handle = mmaccel.attach(model, "jacobi", fused=True)
    shared = storages(packed(model))
    handle.detach(keep_packed=True)
    assert storages(packed(model)) == shared
    with mmaccel.attach(model, "jacobi", fused=True):
        assert storages(packed(model)) == shared
    assert are_apart(packed(model))


@pytest.mark.parametrize("name", ["phi3", "gpt2"])
def test_what_a_checkpoint_has_packed_stays_as_it_is(name: str) -> None:
    model = build_decoder(name)
    before = storages(list(model.parameters()))
    with mmaccel.attach(model, "jacobi", fused=True):
        assert storages(list(model.parameters())) == before


def check_seen(model: Any, fused: CausalLMWindow) -> None:
    """The fused route gives the logits of the model as it is now."""
    own = run_passes(CausalLMWindow(copy.deepcopy(model)))
    received = run_passes(fused)
    assert fused.route.name == "fused"
    for pair in zip(own, received):
        assert compare_logits(*pair).largest < 1e-5


def change_through_data(model: Any) -> None:
    """As peft merges an adapter: no version of a parameter counts it."""
    for parameter in model.parameters():
        parameter.data *= 1.5


def change_by_a_step(model: Any) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=torch.tensor([[1, 2, 3, 4]])).logits.square().mean().backward()
    optimiser.step()


def change_by_assigning(model: Any) -> None:
    state = {name: 1.5 * value for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def change_a_weight(model: Any) -> None:
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(2 * linear.weight.detach())


def change_a_norm(model: Any) -> None:
    norm = model.model.layers[1].input_layernorm
    norm.weight = nn.Parameter(2 * norm.weight.detach())


def change_the_dtype(model: Any) -> None:
    model.to(torch.float64).to(torch.float32)


def change_the_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def change_positions(model: Any) -> None:
    decoder = model.get_decoder()
    table = decoder.wpe if hasattr(decoder, "wpe") else decoder.embed_positions
    table.weight = nn.Parameter(table.weight.detach().flip(0))


LLAMAS = "llama with biases"
OTHERS = ("gpt2", "gpt_neox", "opt, norms after and projections")
STEPS = (change_by_a_step, change_by_assigning, change_through_data)
CHANGES = [
    *((LLAMAS, change) for change in STEPS),
    *zip(OTHERS, STEPS),
    *((LLAMAS, change) for change in (change_a_weight, change_the_dtype, change_the_attention)),
    *((name, change_positions) for name in OTHERS if name != "gpt_neox"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "laid_out"),
    [(*each, False) for each in CHANGES] + [(LLAMAS, change, True) for change in STEPS],
)
def test_a_model_changed_after_the_first_run(
    name: str, change: Callable[[Any], None], laid_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if laid_out:
        lay_out_all(monkeypatch)
    model = build_decoder(name)
    fused = CausalLMWindow(model, fused="auto")
    before = run_passes(fused)
    change(model)
    check_seen(model, fused)
    if change not in (change_the_dtype, change_the_attention):
        assert not torch.allclose(run_passes(fused)[0], before[0], atol=1e-3)


def add_lora(model: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(target_modules=["v_proj"]), model)


def quantise(model: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def hook_a_layer(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def replace_a_forward(model: Any) -> None:
    norm = model.model.norm
    norm.forward = lambda x: x


def parametrize_a_norm(model: Any) -> None:
    torch.nn.utils.parametrize.register_parametrization(model.model.norm, "weight", nn.Identity())


def spread_a_dtype(model: Any) -> None:
    model.model.layers[0].mlp.double()


def hook_the_dropout(model: Any) -> None:
    model.get_decoder().drop.register_forward_hook(lambda *_: None)


def share_a_weight(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.v_proj.weight = attention.k_proj.weight


def share_memory(model: Any) -> None:
    model.share_memory()


def part_norms(model: Any) -> None:
    model.model.layers[1].self_attn.k_norm.variance_epsilon = 0.01


REFUSED = (  # and why; every second one is packed before
    ("llama", add_lora, r"layers\.0\.self_attn\.v_proj, a peft"),
    ("qwen3", part_norms, "norms of queries and keys that differ"),
    ("llama", quantise, "a .*Int8"),
    ("gpt2", hook_the_dropout, "a hook on drop"),
    ("llama", hook_a_layer, r"a hook on layers\.1\.mlp"),
    ("llama", replace_a_forward, "another forward in norm"),
    ("llama", parametrize_a_norm, "norm, a torch.*Parametrized"),
    ("llama", spread_a_dtype, "torch.float32 on cpu, torch.float64 on cpu"),
    ("llama", share_a_weight, "share parameters"),
    ("llama", share_memory, "shared memory"),
)
NEEDED = {add_lora: "peft", quantise: "torchao"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "change", "reason", "is_packed"),
    [(*each, n % 2 == 0) for n, each in enumerate(REFUSED)],
)
def test_what_keeps_the_models_own_forward(
    name: str, change: Callable[[Any], None], reason: str, is_packed: bool
) -> None:
    if change in NEEDED:
        pytest.importorskip(NEEDED[change])
    model = build_decoder(name)
    window = CausalLMWindow(model, fused="auto")
    if is_packed:
        window.choose_route()
        assert window.route.name == "fused"
    change(model)
    window.choose_route()
    assert window.route.name == "model" and re.search(reason, window.route.reason), (
        window.route.reason
    )
    if change not in (quantise, share_a_weight, share_memory):  # and no storage is shared any more
        assert are_apart(model.parameters())


Fault = Callable[..., Any]  # of a kernel and its arguments


def alter(where: int | str, **fields: Any) -> Fault:
    """Other fields of the norms that are this argument, or this option."""

    def fault(own: Any, *args: Any, **options: Any) -> Any:
        given = dict(enumerate(args)) | options
        if given.get(where) is not None:
            given[where] = replace(given[where], **fields)
        return own(*(given[k] for k in range(len(args))), **{k: given[k] for k in options})

    return fault


def forget_the_update(own: Any, hidden: Any, *rest: Any, **options: Any) -> Any:
    return hidden, own(hidden, *rest, **options)[1]


def swap_the_norms(own: Any, *args: Any, norms: Any, **options: Any) -> Any:
    norms = replace(norms, q_weight=norms.k_weight, k_weight=norms.q_weight)
    return own(*args, norms=norms, **options)


def normalise_each_head(own: Any, *args: Any, norms: Any, **options: Any) -> Any:
    """Where the norm is over all heads at once."""
    width = args[3].shape[-1]
    q_weight, k_weight = norms.q_weight.view(-1, width), norms.k_weight.view(-1, width)
    return own(*args, norms=replace(norms, q_weight=q_weight, k_weight=k_weight), **options)


def turn_backwards(own: Any, qkv: Any, cos: Any, sin: Any, *rest: Any, **options: Any) -> Any:
    return own(qkv, cos, -sin, *rest, **options)


def write_one_place_on(own: Any, *args: Any, **options: Any) -> Any:
    return own(*args[:5], args[5] + (args[5] < args[5].max()), **options)


FAULTS: dict[str, dict[str, tuple[str, Fault]]] = {  # kernel -> what is wrong -> model, fault
    "add_norm": {
        "no update": ("llama", forget_the_update),
        "no offset": ("gemma", alter(2, offset=0.0)),
        "another eps": ("llama", alter(2, eps=1e-2)),
        "a norm before the sum with another eps": ("exaone4", alter("post", eps=1e-2)),
    },
    "rope_write": {
        "backwards": ("llama", turn_backwards),
        "one place on": ("llama", write_one_place_on),
        "norms of each other": ("qwen3", swap_the_norms),
        "norms with another eps": ("qwen3", alter("norms", eps=1e-2)),
        "norms of each head": ("olmo2", normalise_each_head),
    },
    "_look_up": {
        "another row": ("llama", lambda own, tables, positions: own(tables, positions // 2))
    },
}
PLANTED = [(kernel, what) for kernel, faults in FAULTS.items() for what in faults]


@pytest.mark.parametrize(("kernel", "what"), PLANTED)
def test_a_planted_fault_is_caught(kernel: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, fault = FAULTS[kernel][what]
    model, own = build_decoder(name), getattr(fused_decoder, kernel)

    @wraps(own)
    def broken(*args: Any, **options: Any) -> Any:
        return fault(own, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(fused_decoder, kernel, broken)
        window = CausalLMWindow(model, fused="auto")
        window.choose_route()
    assert window.route.name == "model"
    assert "off in the" in window.route.reason
    assert are_apart(model.parameters())


def test_a_fault_that_logits_hide_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of little weight, whose error is far below what bfloat16 rounds of the logits."""
    models = [build_decoder("llama", torch.bfloat16) for _ in range(2)]
    layers = [model.model.layers[0].self_attn for model in models]
    for layer in layers:
        layer.o_proj.weight.data *= 1e-3
    own = PackedLinear.__call__

    def swapped(packed: PackedLinear, x: Tensor, n_rows: int | None = None) -> Tensor:
        made = own(packed, x, n_rows)
        if all(packed.linears[0] is not layer.q_proj for layer in layers):
            return made
        return torch.cat([made[:, 4:8], made[:, :4], made[:, 8:]], 1)

    monkeypatch.setattr(PackedLinear, "__call__", swapped)
    window = CausalLMWindow(models[0], fused="auto")
    window.choose_route()
    assert "layer 0, whose attention is" in window.route.reason
    monkeypatch.setattr(route, "check_fused", lambda *_: "")
    fused = CausalLMWindow(models[1], fused=True)
    found = find_differences(CausalLMWindow(models[0]), fused)
    assert max(difference.mean for difference in found) < 0.02


def test_rounding_of_large_scores_is_no_fault() -> None:
    """Keys with large biases, as Qwen2 has: bfloat16 rounds their scores to a few percent."""
    torch.manual_seed(0)
    model = build_decoder("qwen2", torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data.normal_(std=50)
        layer.self_attn.q_proj.weight.data *= 3
    window = CausalLMWindow(model, fused="auto")
    window.choose_route()
    assert window.route.name == "fused"


class Operations(TorchDispatchMode):
    """Counts operations that are kernels on a device: no views, a kernel of ours as one."""

    VIEWS = (
        "view", "t", "transpose", "slice", "unsqueeze", "expand", "detach", "split", "alias",
        "select", "permute", "_unsafe_view", "split_with_sizes", "as_strided",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.__name__.partition(".")[0]
        if name not in self.VIEWS:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


def count_operations(name: str, monkeypatch: pytest.MonkeyPatch, n_layers: int) -> Counter[str]:
    changes: dict[str, Any] = {"num_hidden_layers": n_layers}
    if "layer_types" in RECOGNISED[name][1]:
        changes["layer_types"] = ["sliding_attention", *["full_attention"] * (n_layers - 1)]
    window = CausalLMWindow(build_decoder(name, **changes), fused=True)
    ids = torch.randint(N_IDS, (2, 8))
    window.reserve(2, 20)
    window.forward(Pass(ids, torch.tensor([0, 3])))
    operations = Operations()

    def as_one(specification: Any, device: str) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            operations.found[specification.__name__] += 1
            with _disable_current_modes():
                return specification(*args, **options)

        return launch

    def attend_as_one(specification: Any, *args: Any, **options: Any) -> Any:
        made = as_one(specification, "")(*args, **options)
        with _disable_current_modes():  # heads of a token side by side, as the kernel makes them
            return made.transpose(1, 2).contiguous().transpose(1, 2)

    with monkeypatch.context() as patch, operations:
        patch.setattr(fused_decoder, "_choose", as_one)
        patch.setattr(fused_decoder.dispatch, "run", attend_as_one)
        window.forward(Pass(ids, torch.tensor([3, 5])))
    return operations.found


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "opt", "gemma3", "olmo2"])
def test_a_layer_has_at_most_ten_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products, attention and our kernels; a third layer costs what a second does."""
    few, more = (count_operations(name, monkeypatch, n) for n in (2, 3))
    layer = more - few
    assert layer["rope_write"] == 1 and 1 <= layer["add_norm"] <= 2
    assert sum(layer[one] for one in ("gated_act", "gelu", "relu")) == 1
    assert layer["mm"] + layer["addmm"] == 4
    assert layer.total() == (10 if name == "gpt_neox" else 9), dict(layer)


def test_a_prompt_makes_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = build_decoder("gpt2"), []
    own = fused_decoder.FusedDecoder.logits

    def count(self: Any, hidden: Tensor, n_ids: int) -> Tensor:
        made.append(hidden.shape[1])
        return own(self, hidden, n_ids)

    with mmaccel.attach(model, mmaccel.Autoregressive(), fused=True) as handle:
        monkeypatch.setattr(fused_decoder.FusedDecoder, "logits", count)
        model.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=6, pad_token_id=0)
        assert handle.stats is not None and handle.stats.passes == 6
    assert made == [1] * 6


def test_a_fused_model_is_freed_with_its_last_reference() -> None:
    model = build_decoder("llama")
    window = CausalLMWindow(model, fused=True)
    window.choose_route()
    left = weakref.ref(model)
    del model, window
    gc.collect()
    assert left() is None


def test_copies_and_pickles_begin_unfused() -> None:
    window = CausalLMWindow(build_decoder("llama"), fused=True)
    expected = run_passes(window)
    for other in (copy.deepcopy(window), pickle.loads(pickle.dumps(window))):
        assert all(map(torch.equal, run_passes(other), expected)) and other.route.name == "fused"
        linear = other.model.model.layers[0].mlp.up_proj
        linear.weight.data.zero_()
        assert not torch.equal(run_passes(other)[0], expected[0])
    assert all(map(torch.equal, run_passes(window), expected))


def test_a_model_in_training_mode_is_asked_at_its_first_call() -> None:
    model = build_decoder("llama", attention_dropout=0.3).train()
    prompt, options = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 4, "pad_token_id": 0}
    with mmaccel.attach(model, mmaccel.Jacobi(4), fused=True) as handle:
        model.eval()
        model.generate(prompt, **options, do_sample=False)
        assert handle.stats is not None and handle.stats.route == "fused"
