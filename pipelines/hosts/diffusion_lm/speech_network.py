"""The network of OmniVoice: a Qwen3 that attends both ways over text and frames of Q codes.

H. Zhu et al., "OmniVoice: Towards Omnilingual Zero-Shot Text-to-Speech with Diffusion Language
Models", 2026, arXiv 2604.00688; names of tensors, embedding of a frame and heads as in
https://github.com/k2-fsa/OmniVoice. A position is a token of text, or a frame whose
embedding is the sum of its codes', and whose Q heads say the codes of this very frame.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class SpeechNetwork(nn.Module):
    """The modules under the names that a checkpoint has.

    Args:
        llm: of transformers, without a head.
        books: Q.
        size: V, codes of a book and the mask.
        spreads_text: whether texts stand beside the frames, spread evenly over their positions,
            and not before them, as published.
    """

    def __init__(self, llm: Any, books: int, size: int, spreads_text: bool = False) -> None:
        super().__init__()
        width = llm.config.hidden_size
        self.books, self.size, self.spreads_text = books, size, spreads_text
        self.llm = llm
        self.audio_embeddings = nn.Embedding(books * size, width)
        self.audio_heads = nn.Linear(width, books * size, bias=False)
        self.register_buffer("codebook_layer_offsets", torch.arange(books) * size)

    codebook_layer_offsets: Tensor

    def embed(self, text: Tensor, frames: Tensor) -> Tensor:
        """Ids of text `[R, P]` followed by codes of frames `[R, T, Q]`: `[R, P + T, C]`."""
        words = self.llm.get_input_embeddings()(text)
        sound = self.audio_embeddings(frames + self.codebook_layer_offsets).sum(-2)
        return torch.cat([words, sound], 1)

    def states(self, text: Tensor, frames: Tensor, is_there: Tensor) -> Tensor:
        """Hidden states of the frames `[R, T, C]`; nothing attends to a position that `is_there`
        `[R, P + T]` bool leaves out.
        """
        embeddings = self.embed(text, frames)
        mask = torch.zeros(is_there.shape, dtype=embeddings.dtype, device=embeddings.device)
        mask = mask.masked_fill(~is_there, torch.finfo(mask.dtype).min)[:, None, None]
        hidden = self.llm(
            inputs_embeds=embeddings,
            attention_mask=mask.expand(-1, 1, mask.shape[-1], -1),
            position_ids=self.positions(is_there, text.shape[1]),
            use_cache=False,
        ).last_hidden_state
        frame_states: Tensor = hidden[:, text.shape[1] :]
        return frame_states

    def positions(self, is_there: Tensor, first: int) -> Tensor:
        """`[R, P + T]`, counted from 0 over what is there, with the frames from column P on."""
        if not self.spreads_text:
            return (is_there.cumsum(1) - 1).clamp(min=0)
        counts = [part.cumsum(1).float() for part in (is_there[:, :first], is_there[:, first:])]
        n_words, n_frames = (is_there[:, :first].sum(1), is_there[:, first:].sum(1))
        step = n_frames / n_words.clamp(min=1)  # [R], frames of a token of text
        return torch.cat([(counts[0] - 0.5) * step[:, None] - 0.5, counts[1] - 1], 1)

    def logits(self, states: Tensor) -> Tensor:
        """Hidden states `[..., C]` to logits `[..., Q, V]` of the heads."""
        heads: Tensor = self.audio_heads(states)
        return heads.unflatten(-1, (self.books, self.size))
