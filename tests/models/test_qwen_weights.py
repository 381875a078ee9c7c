"""Block diffusion models whose layers are Qwen's, in transformers' own class: every cache plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmaccel.pipelines.hosts.diffusion_lm.masked_lm import MaskedLM
from mmaccel.pipelines.hosts.diffusion_lm.models import FastDLLMDenoiser, SDARDenoiser
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.canvas.stepwise import Stepwise
from tests.fixtures.canvas import MASK, run
from tests.fixtures.tiny_lms import build_lm

BLOCK, LENGTH = 4, 10


class Published(nn.Module):
    """Qwen's layers with the forward signature of a published family, without a cache."""

    def __init__(self, inner: Any, **config: Any) -> None:
        super().__init__()
        self.inner = inner
        self.config = inner.config
        for name, value in config.items():
            setattr(self.config, name, value)
        self.get_input_embeddings = inner.get_input_embeddings
        self.get_output_embeddings = inner.get_output_embeddings
        self.device, self.dtype = inner.device, inner.dtype

    def run(self, ids: Tensor, allowed: Tensor, positions: Tensor) -> Any:
        mask = torch.zeros(allowed.shape, dtype=self.dtype).masked_fill(~allowed, float("-inf"))
        mask = mask.expand(len(ids), 1, -1, -1)
        inputs: dict[str, Any] = {"attention_mask": mask, "position_ids": positions}
        return self.inner(input_ids=ids, use_cache=False, **inputs)


class FastDLLM(Published):
    """Makes its own mask, and takes no cache."""

    def eval_mask(self, seqlen: int, block_size: int, cache_seq_len: int) -> Tensor:
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_values: None,
        use_cache: bool,
    ) -> Any:
        return self.run(input_ids, self.eval_mask(input_ids.shape[1], 32, 0), position_ids)


class SDAR(Published):
    """Takes a boolean mask, and no cache."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_values: None,
        use_cache: bool,
        store_kv: bool,
    ) -> Any:
        return self.run(input_ids, attention_mask, position_ids)


FAMILIES: dict[str, tuple[str, Any, Any, int, dict[str, Any]]] = {
    "Fast_dLLM_Qwen": ("qwen2", FastDLLM, FastDLLMDenoiser, 1, {"bd_size": BLOCK}),
    "sdar": ("qwen3", SDAR, SDARDenoiser, 0, {"block_size": BLOCK}),
}


def reload(model: Any, family: str, folder: Path, **config: Any) -> Any:
    """Save with another `model_type` and remote code, and load by the class of the layers."""
    model.save_pretrained(folder)
    file = folder / "config.json"
    written = json.loads(file.read_text()) | {"model_type": family, **config}
    written["auto_map"] = {"AutoModelForCausalLM": "modeling.Remote"}
    file.write_text(json.dumps(written))
    return type(model).from_pretrained(folder, dtype=torch.float64).eval()


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_in_the_class_of_their_layers(
    family: str, temperature: float, tmp_path: Path
) -> None:
    name, signature, denoiser, shift, config = FAMILIES[family]
    inner = build_lm(name, initializer_range=0.35).double()
    own = denoiser(signature(inner, **config), MASK)
    assert not own.supports_kv_cache
    model = MaskedLM(reload(inner, family, tmp_path, **config), MASK, shift=shift, block=BLOCK)
    expected = run(Stepwise(), own, LENGTH, temperature)
    made = run(Stepwise(cache="block"), model, LENGTH, temperature)
    drafted = run(LosslessUnmask(3, cache="block"), model, LENGTH, temperature)
    assert torch.equal(made.tokens, expected.tokens)
    assert torch.equal(drafted.tokens, expected.tokens)
    assert int(made.stats.positions) < int(expected.stats.positions) / 2
