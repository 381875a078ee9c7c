"""FastV with the attention mass of one query, beside FastV with eager attention maps.

    python benchmarks/fastv_eager.py --layers 24 --json benchmarks/results/fastv-eager-cpu.json

Both choose by the last token's attention in the layer before the cut. The library computes that
attention from the layer's queries and keys and keeps every layer's fast kernel. Published code
takes it from an attention map, which only eager attention gives out: in that one layer, or, as
`attn_implementation="eager"` with `output_attentions` does, in all of them.

The model has the sizes of LLaVA-OneVision-0.5B and random weights. Random features stand for those
of an image, so that the encoder does not run; each way answers with one token, in a rotating order.
Peak memory is the process's, above what it held before the call.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import mmaccel  # noqa: E402
from benchmarks.visual_prefill import build_model  # noqa: E402
from mmaccel.outputs.machine import describe_machine  # noqa: E402
from mmaccel.outputs.whole_files import write_whole  # noqa: E402
from mmaccel.pipelines.attach.prompt_pass import PrefillPass  # noqa: E402
from mmaccel.pipelines.causal_lm.own_prompt import PromptStates  # noqa: E402
from mmaccel.pipelines.vision_language.layer_attention import (  # noqa: E402
    LayerAttention,
    NotedLayers,
)

WHOLE = "all tokens"
MASS = "FastV, mass of one query"
ONE_MAP = "FastV, map of one eager layer"
ALL_MAPS = "FastV, eager attention, maps"
WAYS = (WHOLE, MASS, ONE_MAP, ALL_MAPS)
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def main(argv: list[str] | None = None) -> None:
    """Measures and writes the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=float, default=0.22)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8, help="of the language model; 24 are whole")
    parser.add_argument("--visual-tokens", type=int, default=2943)
    parser.add_argument("--json", type=Path, help="write the report here")
    args = parser.parse_args(argv)
    model = build_model(args.layers)
    inputs = draw_inputs(model, args.visual_tokens)
    method = mmaccel.FastV(keep=args.keep)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    choices: dict[str, Tensor] = {}
    for k in range(args.rounds):
        for way in WAYS[k % 4 :] + WAYS[: k % 4]:
            row, choices[way] = answer(model, way, method, inputs)
            found[way].append(row)
            print(k, way, row, flush=True)
    report = {
        "command": " ".join(["python", *sys.argv]) if argv is None else "",
        "machine": describe_machine("cpu"),
        "model": f"LLaVA-OneVision-0.5B sizes, {args.layers} layers, random weights, float32",
        "visual_tokens": args.visual_tokens,
        "text_tokens": 40,
        "keep": args.keep,
        "fastv_eager": [
            {
                "method": way,
                "settings": "" if way == WHOLE else repr(method),
                "seconds": statistics.median(run["seconds"] for run in runs),
                "peak_megabytes": _median([run["peak_megabytes"] for run in runs]),
                "same_choice": share_of_same(choices[way], choices[MASS]),
            }
            for way, runs in found.items()
        ],
    }
    if args.json is not None:
        text = json.dumps(report, indent=1) + "\n"
        write_whole(args.json, lambda path: path.write_text(text, encoding="utf-8"))


def draw_inputs(model: Any, n_visual: int) -> dict[str, Any]:
    """Arguments of `generate`: one image of random features between 8 and 32 tokens of text."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    rng = torch.Generator().manual_seed(0)
    mark = int(model.config.image_token_id)
    ids = torch.randint(1, min(1000, mark), (1, 40), generator=rng)
    ids = torch.cat([ids[:, :8], torch.full((1, n_visual), mark), ids[:, 8:]], 1)
    features = torch.randn(n_visual, model.config.text_config.hidden_size, generator=rng)
    encoded = BaseModelOutputWithPooling(pooler_output=[features * 0.02])
    mask = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask, "mm_encoder_outputs": {"image": encoded}}


def answer(
    model: Any, way: str, method: mmaccel.FastV, inputs: dict[str, Any]
) -> tuple[dict[str, Any], Tensor]:
    """Seconds and peak memory of one token, and the columns that the last layers kept."""
    before = method.layer - 1
    reads = {
        WHOLE: nullcontext(),
        MASS: nullcontext(),
        ONE_MAP: one_eager_layer(model, before),
        ALL_MAPS: eager_everywhere(model, before),
    }[way]
    reducer = None if way == WHOLE else method
    with reads, kept_columns() as kept:
        policy = mmaccel.Autoregressive()
        with mmaccel.attach(model, policy, strict=True, seed=0, visual_tokens=reducer) as run:
            given = inputs | {"mm_encoder_outputs": dict(inputs["mm_encoder_outputs"])}
            held = reset_peak()
            began = time.perf_counter()
            model.generate(**given, max_new_tokens=1, do_sample=False)
            seconds = time.perf_counter() - began
            peak = read_peak()
    assert reducer is None or run.stats.reference
    above = None if held is None or peak is None else (peak - held) / 1e3
    columns = kept[-1] if kept else torch.arange(inputs["input_ids"].shape[1])[None]
    return {"seconds": seconds, "peak_megabytes": above}, columns


@contextmanager
def one_eager_layer(model: Any, number: int) -> Iterator[None]:
    """Inside the block, one layer attends eagerly and the choice reads its map."""
    attention = model.get_decoder().layers[number].self_attn
    own, attention.config = attention.config, copy.copy(attention.config)
    attention.config._attn_implementation = "eager"

    def masked(_module: Any, args: Any, given: dict[str, Any]) -> Any:
        if given.get("attention_mask") is None:  # sdpa's, which is causal by itself
            hidden = args[0] if args else given["hidden_states"]
            width = hidden.shape[1]
            lowest = torch.finfo(hidden.dtype).min
            mask = torch.full((width, width), lowest, dtype=hidden.dtype).triu(1)
            given = given | {"attention_mask": mask[None, None]}
        return args, given

    hook = attention.register_forward_pre_hook(masked, with_kwargs=True)
    try:
        with reading_map(attention):
            yield
    finally:
        hook.remove()
        attention.config = own


@contextmanager
def eager_everywhere(model: Any, number: int) -> Iterator[None]:
    """Inside the block, all layers attend eagerly and the choice reads one layer's map."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with reading_map(model.get_decoder().layers[number].self_attn):
            yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def reading_map(attention: Any) -> Iterator[None]:
    """Inside the block, methods read the map `[B, H, T, T]` that a layer gives out."""
    maps: list[Tensor] = []

    def keep(_module: Any, _given: Any, made: Any) -> None:
        maps.append(made[1])

    def mass(self: LayerAttention, layer: int, queries: str, per_head: bool) -> Tensor:
        index = self.visual.index.where(self.visual.valid, 0)
        rows: Tensor = maps.pop()[:, :, -1].sum(1)  # [B, T], over heads
        return rows.gather(1, index).where(self.visual.valid, 0.0)

    own, watchers = LayerAttention.mass, NotedLayers.watchers
    hook = attention.register_forward_hook(keep)
    LayerAttention.mass = mass  # type: ignore[method-assign, assignment]
    NotedLayers.watchers = property(lambda _: [])  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        hook.remove()
        LayerAttention.mass = own  # type: ignore[method-assign]
        NotedLayers.watchers = watchers  # type: ignore[method-assign]


@contextmanager
def kept_columns() -> Iterator[list[Tensor]]:
    """The columns `[B, T']` that are left after each cut inside the block."""
    run, found = PrefillPass.run, list[Tensor]()

    def record(self: PrefillPass, *given: Any) -> PromptStates:
        states = run(self, *given)
        found.extend(cut.columns for cut in states.cuts)
        return states

    PrefillPass.run = record  # type: ignore[method-assign]
    try:
        yield found
    finally:
        PrefillPass.run = run  # type: ignore[method-assign]


def share_of_same(columns: Tensor, others: Tensor) -> float:
    """The fraction of `others` that is among `columns`; rounding may order near ones otherwise."""
    return float(torch.isin(others, columns).float().mean())


def reset_peak() -> int | None:
    """Kilobytes that the process holds, from which its peak counts again; None off Linux."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return None
    return _read_status("VmRSS")


def read_peak() -> int | None:
    """The most kilobytes that the process held since `reset_peak`; None off Linux."""
    return _read_status("VmHWM")


def _read_status(name: str) -> int | None:
    if not _STATUS.is_file():
        return None
    lines = _STATUS.read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), None)


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


if __name__ == "__main__":
    main()
