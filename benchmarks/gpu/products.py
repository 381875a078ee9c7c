"""Steps of one token by each way to multiply few rows, what the same bits cost, and depth chains.

The ways: what a trial on the device chooses ("auto"), products that norm, gate and add as they go
("row_product"), also launched before the kernel in front of them has ended ("early"), products
alone ("mm"), and those whose bits depend on no other row ("exact"). The
floor is what a step has to read at the speed of a copy. Of "exact" it is also measured whether rows
have the same bits: tokens of windows are those of the plain loop, alone and in a batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import mmaccel
from benchmarks.gpu.kernels import copy_bandwidth
from benchmarks.gpu.models import SIZES, Size, build, key_bytes, open_window, shrink, weight_bytes
from benchmarks.gpu.parts import Part, raise_failed, reason_of
from benchmarks.gpu.steps import device_clock, time_step
from mmaccel.contracts import Prompt
from mmaccel.kernels import dispatch
from mmaccel.pipelines.hosts.causal_lm.image_vocabulary import ImageTokenWindow
from mmaccel.pipelines.hosts.runner import fused_decoder
from mmaccel.policies import Policy
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.autoregressive import Autoregressive
from mmaccel.samplers.window.jacobi import Jacobi

Row = dict[str, Any]
WAYS = ("auto", "row_product", "row_product, early", "mm", "exact")
CHAINS: tuple[Policy, ...] = (
    Autoregressive(), Jacobi(4), Jacobi(8), Jacobi(8, drafts="previous-frame")
)  # fmt: skip
_CONTEXT = 1024


def product_parts(tiny: bool) -> dict[str, Part]:
    chosen = [size for size in SIZES if size.name.startswith(("Janus", "GLM"))]
    parts: dict[str, Part] = {
        f"products-{size.name.lower()}": partial(measure_products, size, tiny=tiny)
        for size in chosen
    }
    return parts | {"depth-chain": partial(measure_chain, tiny=tiny)}


@contextmanager
def multiplying(way: str, device: torch.device) -> Iterator[None]:
    """Inside the block the fused decoder multiplies in one of `WAYS`."""
    if way == "mm":
        with mock.patch.object(fused_decoder, "MOST_ROWS", 0):
            yield
        return
    if not way.startswith("row_product") or device.type != "cuda":
        yield
        return
    from mmaccel.kernels import row_product_triton

    with (
        mock.patch.dict(os.environ, {dispatch.VARIABLE: "triton"}),
        mock.patch.object(row_product_triton, "LAUNCHES_EARLY", "early" in way),
    ):
        yield


@torch.no_grad()
def measure_products(size: Size, device: torch.device, tiny: bool = False) -> Row:
    """Captured steps of one token, by way."""
    peak = copy_bandwidth(device, tiny)
    size, context = (shrink(size), 24) if tiny else (size, _CONTEXT)
    model = build(size, device)
    found: list[Row] = []
    for way in WAYS:
        row: Row = {"name": way, "model": size.name, "wrong": ""}
        try:
            with multiplying(way, device):
                window: Any = open_window(model, size)
                window.setup.fused = "exact" if way == "exact" else True
                count = (8, 2) if tiny else (64, 10)
                step = time_step(window, Autoregressive(), context, count=count)
                n_bytes = weight_bytes(model, window.vocab_size)
                n_bytes += key_bytes(model, 2, round(step["positions"]))
                floor = n_bytes / peak / 1e6
                row |= {"floor_ms": floor, "share_of_floor": floor / step["ms"]} | step
                decoder = window.forwards.decoder
                row["by_rows"] = {str(key): taken for key, taken in decoder.by_rows.items()}
                if way == "exact":
                    row["bits"] = compare_bits(window, tiny)
        except Exception as error:  # the others are measured all the same
            row["wrong"] = reason_of(error)
        found.append(row)
    kept = {"copy_gb_per_s": peak, "products": found}
    raise_failed(found, "ways", kept)
    return kept


def compare_bits(window: Any, tiny: bool) -> Row:
    """Of runs of several widths and batches, the share of row 0's tokens that are the plain loop's,
    and what they claim.
    """
    length = 8 if tiny else 96
    ids = torch.arange(3 * 12, device=window.device).view(3, 12) % 90 + 5
    made: list[Tensor] = []
    claims = set[str]()
    for policy, rows in ((Autoregressive(), 1), (Jacobi(4), 1), (Jacobi(16), 3)):
        prompt = Prompt(ids[:rows], torch.full((rows,), 12, device=window.device))
        if isinstance(window, ImageTokenWindow):
            window.begin(prompt)
        noise = Noise.from_seed(3, rows, window.device)
        run = policy.sample(window, prompt, length, params=SamplingParams(), noise=noise)
        made.append(run.tokens[:1])
        claims.add(run.stats.exactness)
    same = [float((other == made[0]).float().mean()) for other in made[1:]]
    return {"same": same, "exactness": sorted(claims)}


@torch.no_grad()
def measure_chain(device: torch.device, tiny: bool = False) -> Row:
    """Frames of 16 codes, of which a depth decoder of CSM's class makes 15: its own loop, the plain
    chain, and windows, in the graphs of the frame before.
    """
    model = _make_depth(device, tiny)
    peak = copy_bandwidth(device, tiny)
    floor = sum(p.nbytes for p in model.parameters()) / peak / 1e6
    n_frames, n_before = (4, 2) if tiny else (40, 6)
    found: list[Row] = []
    for policy in (None, *CHAINS):
        row: Row = {"name": "generate" if policy is None else repr(policy), "wrong": ""}
        try:
            row |= _time_frames(model, policy, n_frames, n_before) | {"floor_ms_a_pass": floor}
        except Exception as error:
            row["wrong"] = reason_of(error)
        found.append(row)
    kept = {"copy_gb_per_s": peak, "chains": found}
    raise_failed(found, "chains", kept)
    return kept


def _make_depth(device: torch.device, tiny: bool) -> Any:
    from transformers import CsmDepthDecoderConfig, CsmDepthDecoderForCausalLM

    sizes: dict[str, Any] = dict(
        hidden_size=1024, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=2051, backbone_hidden_size=2048,
    )  # fmt: skip
    if tiny:
        sizes |= dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=64)
        sizes |= dict(num_hidden_layers=2, backbone_hidden_size=32)
    config = CsmDepthDecoderConfig(num_codebooks=16, max_position_embeddings=17, **sizes)
    dtype = torch.float32 if tiny else torch.bfloat16
    torch.manual_seed(0)
    model: Any = CsmDepthDecoderForCausalLM(config)
    return model.to(device, dtype).eval()


def _time_frames(model: Any, policy: Policy | None, n_frames: int, n_before: int) -> Row:
    """Milliseconds of a frame of one row, the median, and what ran."""
    clock = device_clock(model.device)
    generator = torch.Generator().manual_seed(1)
    width = model.config.backbone_hidden_size
    state = torch.randn(1, width, generator=generator).to(model.device, model.dtype)
    ids = torch.tensor([[0, 5]], device=model.device)
    n_new = model.config.num_codebooks - 1
    make: Callable[[], Any] = partial(
        model.generate, input_ids=ids, backbone_last_hidden_state=state, min_new_tokens=n_new,
        max_new_tokens=n_new, do_sample=True,
    )  # fmt: skip

    def run() -> float:
        times = []
        for _ in range(n_before + n_frames):
            began = clock()
            make()
            times.append(clock() - began)
        return 1000 * median(times[n_before:])

    if policy is None:
        return {"ms": run()}
    with mmaccel.attach(model, policy, seed=7, strict=True) as handle:
        ms = run()
    last = handle.stats
    assert last is not None
    return {"ms": ms, "passes": last.passes, "runner": last.runner, "reason": last.runner_reason}
