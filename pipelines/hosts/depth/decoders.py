"""Depth decoders of transformers: how each kind scores the codes of one frame.

A temporal decoder gives a state and maybe a frame's first code, a small *depth decoder* the others,
one by one (Z. Borsos et al., "SoundStorm", 2023; D. Lee et al., "Autoregressive Image Generation
using Residual Quantization", CVPR 2022, section 3.3). A kind says which embeddings and heads its
books have; the layers are those of any causal LM.

Source: transformers 5.24, `csm`, `moshi` and `qwen3_omni_moe`, which call `generate` of these
decoders once a frame.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.pipelines.hosts.causal_lm.route import run_model
from mmaccel.pipelines.hosts.depth.family import DepthDecoder, SharedLayers
from mmaccel.pipelines.hosts.depth.window import DepthWindow
from mmaccel.pipelines.hosts.generate_call import READ, SAMPLE


class CsmDepth(SharedLayers):
    """`CsmDepthDecoderForCausalLM`: the backbone's state, the first code, then 31 others."""

    state_argument = "backbone_last_hidden_state"
    arguments = SAMPLE | {state_argument: READ}
    n_before = 2

    def embed(self, model: Any, entries: Tensor, first: int, states: Tensor) -> Tensor:
        # entry 0 is the state, entry e a code of book e - 1; one table has the ids of all books
        entry = torch.arange(first, first + entries.shape[1], device=entries.device)
        books = (entry - 1).clamp(min=0)
        embedded: Tensor = model.model.embed_tokens(entries + books * model.vocab_size)
        if first == 0:
            embedded = torch.cat([states[:, None], embedded[:, 1:]], 1)
        return embedded

    def enter(self, model: Any, embedded: Tensor) -> Tensor:
        entered: Tensor = model.model.inputs_embeds_projector(embedded)
        return entered

    def run_body(self, model: Any, **inputs: Any) -> Any:
        del inputs["position_ids"]  # which it counts itself
        return model.model(**inputs)

    def score(self, model: Any, hidden: Tensor, first: int) -> Tensor:
        n_headless = 0 if first else 1  # the state's own entry
        hidden = hidden[:, n_headless:].transpose(0, 1)  # [n, R, D]
        book = first + n_headless - 1  # entry e is scored by the head of book e, number e - 1
        heads = model.codebooks_head.weight[book : book + len(hidden)]  # [n, D, V]
        return pad(torch.bmm(hidden, heads).transpose(0, 1), (0, 0, n_headless, 0))

    def shape(self, model: Any) -> tuple[int, ...]:
        return (model.config.backbone_hidden_size,)


class MoshiDepth(DepthDecoder):
    """`MoshiDepthDecoder`: the text token, then 8 codes, each by layers of its own."""

    state_argument = "last_hidden_state"
    arguments = SAMPLE | {state_argument: READ}
    n_before = 1

    def vocab_size(self, model: Any) -> int:
        return int(model.config.audio_vocab_size)

    def run(self, window: DepthWindow, entries: Tensor, first: int, inputs: Any) -> Tensor:
        model, states = window.model, window.states
        assert states is not None
        tables = (model.text_embed_tokens, *model.embed_tokens)[first:]  # entry 0 is the text token
        embedded = [table(ids[:, None]) for table, ids in zip(tables, entries.unbind(1))]
        inputs |= {
            "input_ids": entries,
            "inputs_embeds": torch.cat(embedded, 1),
            "last_hidden_state": states.expand(-1, entries.shape[1], -1),
        }
        logits: Tensor = run_model(window, inputs).logits
        return logits

    def shape(self, model: Any) -> tuple[int, ...]:
        return 1, model.config.input_size


class CodePredictor(SharedLayers):
    """Qwen3-Omni's: embeddings of the talker's state and of the first code, then 15 codes.

    The talker reads the embeddings of the codes among hidden states: calls get those.
    """

    state_argument = "inputs_embeds"
    arguments = SAMPLE | {state_argument: READ, "output_hidden_states": READ}
    has_ids = False
    of_tokens = frozenset({"hidden_states"})
    n_before = 2

    def n_entries(self, model: Any) -> int:
        return len(model.lm_head) + 1

    def embed(self, model: Any, entries: Tensor, first: int, states: Tensor) -> Tensor:
        before = states[:, first:]  # of entries 0 and 1, as far as the pass has them
        book = max(first - self.n_before, 0)
        codes = self.embed_codes(model, entries[:, before.shape[1] :], book)
        return torch.cat([before, *codes], 1)

    def score(self, model: Any, hidden: Tensor, first: int) -> Tensor:
        heads = [model.lm_head[0], *model.lm_head][first:]  # the state's own entry has none
        return torch.stack([head(state) for head, state in zip(heads, hidden.unbind(1))], 1)

    def embed_codes(self, model: Any, codes: Tensor, book: int = 0) -> list[Tensor]:
        """`[R, 1, D]` of each of the codes `[R, n]` of books from `book` on."""
        tables = zip(model.get_input_embeddings()[book:], codes.unbind(1))
        return [table(code)[:, None] for table, code in tables]

    def make_steps(self, model: Any, tokens: Tensor) -> dict[str, tuple[Any, ...]]:
        states = [(each,) for each in self.embed_codes(model, tokens[:, :-1])]
        return {"hidden_states": ((), *states)}

    def shape(self, model: Any) -> tuple[int, ...]:
        return 2, model.get_input_embeddings()[0].embedding_dim


class TTSCodePredictor(CodePredictor):
    """Qwen3-TTS's, where a layer narrows what is read (QwenLM/Qwen3-TTS at 022e286)."""

    def embed(self, model: Any, entries: Tensor, first: int, states: Tensor) -> Tensor:
        embedded = super().embed(model, entries, first, states)
        narrowed: Tensor = model.small_to_mtp_projection(embedded)
        return narrowed
