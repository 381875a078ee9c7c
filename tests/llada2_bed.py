"""A LLaDA2 pipeline with tiny random weights and the published model's signature.

The layers are Llama's; what stands for LLaDA2 is how masks are read. A 4-D mask is 1 where an entry
may look, of shape `[B, 1, L, L + kept]`. A 2-D mask is read in one of the ways that published code
does: refused (LLaDA2.0 and 2.1 as released), as visible keys ("full"), token by token ("causal"),
as either of these ("fickle": causal where anything is hidden, as helpers of transformers make it of
scaled dot product attention), or as blocks ("blocks"). Every reading has a class of its own, which
is declared as its author would declare it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.block_masks import BLOCK_MASKS, BlockMasks

BLOCK_MASKS |= {
    "BlocksBed": BlockMasks("blocks", "zero-one"),
    "CausalBed": BlockMasks("causal", "zero-one"),
    "FickleBed": BlockMasks("causal", "zero-one"),
    "FullBed": BlockMasks(None, "zero-one"),
    "RefusedBed": BlockMasks(None, "zero-one"),
}
VOCAB, MASK, END, PAD = 41, 40, 3, 0


def build_model(reading: str, block: int = 8, dtype: torch.dtype = torch.float64) -> Any:
    """A model in evaluation mode, the same at every call; `block` of reading "blocks"."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class LLaDA2Bed(LlamaForCausalLM):
        """Reads masks as LLaDA2 does."""

        def forward(
            self,
            input_ids: Tensor | None = None,
            attention_mask: Tensor | None = None,
            position_ids: Tensor | None = None,
            past_key_values: Any = None,
            use_cache: bool | None = None,
            **others: Any,
        ) -> Any:
            assert input_ids is not None and attention_mask is not None
            self.fed.append(input_ids.numel())
            rows, width = input_ids.shape
            kept = 0 if past_key_values is None else past_key_values.get_seq_length()
            if attention_mask.ndim == 4:
                if attention_mask.shape != (rows, 1, width, kept + width):
                    raise ValueError(f"expected a block mask, got {list(attention_mask.shape)}")
                seen = (1.0 - attention_mask) == 0
            else:
                seen = self._read(attention_mask, kept, width)
            never = torch.finfo(self.dtype).min
            scores = (~seen).to(self.dtype) * never
            return super().forward(
                input_ids=input_ids, attention_mask=scores, position_ids=position_ids,
                past_key_values=past_key_values, use_cache=use_cache,
            )  # fmt: skip

        def _read(self, visible: Tensor, kept: int, width: int) -> Tensor:
            if self.reading == "refused":
                raise ValueError("LLaDA2.0 takes a block mask only")
            keys = torch.arange(kept + width, device=visible.device)
            queries = keys[kept:, None]
            if self.reading == "blocks":
                keys, queries = keys // self.block, queries // self.block
            may = keys <= queries
            fickle = self.reading == "fickle" and bool(visible.all())
            may = may | (self.reading == "full" or fickle)
            return (visible[:, None, None, :].bool() & may).expand(-1, 1, width, -1)

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        initializer_range=0.25, bos_token_id=1, eos_token_id=END, pad_token_id=PAD,
    )  # fmt: skip
    torch.manual_seed(5)
    model: Any = type(f"{reading.title()}Bed", (LLaDA2Bed,), {})(config).to(dtype).eval()
    model.reading, model.block, model.fed = reading, block, []
    return model


class Words:
    """A tokenizer of one letter a token, padding on the left."""

    eos_token_id, mask_token_id, pad_token_id = END, MASK, PAD
    chat_template = None

    def __call__(self, prompt: Any, return_tensors: str = "pt", padding: bool = False) -> Any:
        rows = [[4 + ord(letter) % 30 for letter in text] for text in _listed(prompt)]
        longest = max(map(len, rows))
        ids = [[PAD] * (longest - len(row)) + row for row in rows]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}

    def batch_decode(self, rows: Any, skip_special_tokens: bool = True) -> list[str]:
        return [" ".join(str(int(token)) for token in row) for row in rows]


def _listed(prompt: Any) -> list[str]:
    return [prompt] if isinstance(prompt, str) else list(prompt)


def build_pipe(reading: str, block: int = 8, **scheduler: Any) -> Any:
    """A pipeline over `build_model`, without progress bars."""
    from diffusers import BlockRefinementScheduler, LLaDA2Pipeline

    pipe = LLaDA2Pipeline(
        model=build_model(reading, block),
        scheduler=BlockRefinementScheduler(block_length=block, **scheduler),
        tokenizer=Words(),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
