"""Depth decoders of transformers: how each kind scores the codes of one frame.

A speech model of several codebooks generates a frame in two stages: a temporal decoder gives a
state and maybe the first code, and a small *depth decoder* the other codes, one after the other
(Z. Borsos et al., "SoundStorm", 2023; D. Lee et al., "Autoregressive Image Generation using
Residual Quantization", CVPR 2022, section 3.3). What a kind has in common is a `DepthDecoder`: its
own forward over several codes of a frame at once, which a window of codes needs.

Shapes: **R** rows, **P** entries of a frame before the codes that are generated, **n** entries of a
pass, **V** codes of a codebook, **D** width.

Source: transformers 5.24, `csm`, `moshi` and `qwen3_omni_moe`, whose `generate` calls `generate` of
these decoders once a frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.depth.family import DepthDecoder
from mmaccel.pipelines.generate_call import READ, SAMPLE
from mmaccel.pipelines.layers.attention_name import own_attention
from mmaccel.pipelines.transformers_release import CACHE


class CsmDepth(DepthDecoder):
    """`CsmDepthDecoderForCausalLM`: the backbone's state, the first code, then 31 others."""

    given = ("backbone_last_hidden_state",)
    arguments = SAMPLE | dict.fromkeys(given, READ)
    n_before = 2

    def vocab_size(self, model: Any) -> int:
        return int(model.config.vocab_size)

    def n_entries(self, model: Any) -> int:
        return int(model.config.num_codebooks)

    def score(
        self, model: Any, entries: Tensor, given: Mapping[str, Any], cache: Any = None
    ) -> Tensor:
        logits: Tensor = model(
            input_ids=entries,
            backbone_last_hidden_state=None if count_held(cache) else given[self.given[0]],
            attention_mask=make_mask(model, entries, cache),
            logits_to_keep=entries.shape[1],  # the state's own entry gets those of any head
            use_cache=cache is not None,
            return_dict=True,
            **{CACHE: cache},
        ).logits
        return logits

    def example(self, model: Any, rows: int) -> dict[str, Any]:
        config = model.config
        return {
            "input_ids": torch.zeros(rows, 2, dtype=torch.int64, device=model.device),
            "backbone_last_hidden_state": draw_states(model, rows, config.backbone_hidden_size),
        }


class MoshiDepth(DepthDecoder):
    """`MoshiDepthDecoder`: the text token, then 8 codes, the main decoder's state in each entry."""

    given = ("last_hidden_state",)
    arguments = SAMPLE | dict.fromkeys(given, READ)
    n_before = 1

    def vocab_size(self, model: Any) -> int:
        return int(model.config.audio_vocab_size)

    def n_entries(self, model: Any) -> int:
        return int(model.config.num_codebooks)

    def score(
        self, model: Any, entries: Tensor, given: Mapping[str, Any], cache: Any = None
    ) -> Tensor:
        state = given["last_hidden_state"].expand(-1, entries.shape[1], -1)
        tables = (model.text_embed_tokens, *model.embed_tokens)[count_held(cache) :]
        embedded = [table(ids[:, None]) for table, ids in zip(tables, entries.unbind(1))]
        logits: Tensor = model(
            input_ids=entries,
            inputs_embeds=torch.cat(embedded, 1),  # the model looks for its tables on the host
            last_hidden_state=state,
            attention_mask=make_mask(model, entries, cache),
            use_cache=cache is not None,
            return_dict=True,
            **{CACHE: cache},
        ).logits
        return logits

    def example(self, model: Any, rows: int) -> dict[str, Any]:
        return {
            "input_ids": torch.zeros(rows, 1, dtype=torch.int64, device=model.device),
            "last_hidden_state": draw_states(model, rows, model.config.input_size)[:, None],
        }


class CodePredictor(DepthDecoder):
    """The code predictor of Qwen3-Omni's talker: embeddings of the talker's state and of the first
    code, then 15 codes, each with an embedding and a head of its own.

    Of hidden states, which the talker asks for, calls get the embeddings of the codes, which are
    what it reads, and none of the prompt.
    """

    given = ("inputs_embeds",)
    arguments = SAMPLE | {"inputs_embeds": READ, "output_hidden_states": READ}
    of_tokens = frozenset({"hidden_states"})
    n_before = 2

    def vocab_size(self, model: Any) -> int:
        return int(model.vocab_size)

    def n_entries(self, model: Any) -> int:
        return len(model.lm_head) + 1

    def score(
        self, model: Any, entries: Tensor, given: Mapping[str, Any], cache: Any = None
    ) -> Tensor:
        n_held = count_held(cache)
        before = given["inputs_embeds"][:, n_held:]
        n_given = before.shape[1]
        codes = self.embed(model, entries[:, n_given:], max(n_held - self.n_before, 0))
        hidden = model.model(
            inputs_embeds=self.project(model, torch.cat([before, *codes], 1)),
            attention_mask=make_mask(model, entries, cache),
            use_cache=cache is not None,
            return_dict=True,
            **{CACHE: cache},
        ).last_hidden_state
        heads = [model.lm_head[0], *model.lm_head][n_held:]  # the state's own entry has none
        scored = zip(heads, hidden.unbind(1))
        return torch.stack([head(state) for head, state in scored], 1)

    def project(self, model: Any, embedded: Tensor) -> Tensor:
        """What the decoder's layers read of embeddings `[R, n, D]`."""
        return embedded

    def embed(self, model: Any, codes: Tensor, book: int = 0) -> list[Tensor]:
        """`[R, 1, D]` of each of the codes `[R, n]`, which begin at the second book, or at one
        behind it.
        """
        tables = zip(model.get_input_embeddings()[book:], codes.unbind(1))
        return [table(code)[:, None] for table, code in tables]

    def make_steps(self, model: Any, tokens: Tensor) -> dict[str, tuple[Any, ...]]:
        states = [(each,) for each in self.embed(model, tokens[:, :-1])]
        return {"hidden_states": ((), *states)}

    def example(self, model: Any, rows: int) -> dict[str, Any]:
        width = model.get_input_embeddings()[0].embedding_dim
        states = [draw_states(model, rows, width) for _ in range(2)]
        return {"inputs_embeds": torch.stack(states, 1)}


class TTSCodePredictor(CodePredictor):
    """The code predictor of Qwen3-TTS's talker, which is wider: a layer between them narrows what
    the decoder reads.

    Source: QwenLM/Qwen3-TTS at 022e286, of transformers 4.57.
    """

    def project(self, model: Any, embedded: Tensor) -> Tensor:
        narrowed: Tensor = model.small_to_mtp_projection(embedded)
        return narrowed


def count_held(cache: Any) -> int:
    """Entries of a frame that a cache holds."""
    return 0 if cache is None else int(cache.get_seq_length())


def make_mask(model: Any, entries: Tensor, cache: Any) -> Tensor:
    """A causal mask `[R, 1, n, held + n]` of entries `[R, n]` behind those that a cache holds,
    which is added to scores: without it the models' own masking looks for padding, on the host.
    Other attention takes one of columns.
    """
    n_held = count_held(cache)
    rows, n = entries.shape
    if own_attention(model.config) not in ("eager", "sdpa"):
        return entries.new_ones(rows, n_held + n)
    lowest = torch.finfo(model.dtype).min
    hidden = torch.full((n, n_held + n), lowest, dtype=model.dtype, device=entries.device)
    return hidden.triu(n_held + 1).expand(rows, 1, -1, -1)


def draw_states(model: Any, rows: int, width: int) -> Tensor:
    """`[rows, width]` of a normal distribution, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, width, generator=generator, dtype=torch.float32).to(
        model.device, model.dtype
    )
