"""A canvas of T frames of Q codes as a `Denoiser`: slot t Q + q is code q of frame t.

H. Zhu et al., "OmniVoice", 2026, arXiv 2604.00688. The loop has a column a slot; a pass folds the Q
columns of a frame into one position, and Q heads answer for them. The unconditional branch of
guidance has the frames alone: its prompt is one token, which is left out.

Departures: frames that a row has not are left out of every pass, and the others count from the
row's own first token, so that a row is what it is alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass, Denoiser
from mmaccel.pipelines.hosts.diffusion_lm.selected_logits import gather_rows
from mmaccel.pipelines.hosts.diffusion_lm.speech_network import SpeechNetwork


class SpeechCanvas(Denoiser):
    """Ids below V are codes and the mask; `to_canvas` moves those of text above them.

    Cost: a pass asks the device once for how much text and how many frames there are.
    """

    any_rows = True
    kv_cache_reason = "its frames attend to each other both ways, and no pass keeps any"

    def __init__(self, model: SpeechNetwork, mask_token: int) -> None:
        self.model, self.mask_token = model, mask_token
        self.books, self.vocab_size = model.books, model.size
        self._n_words = model.llm.config.vocab_size
        self.nothing = self.vocab_size + self._n_words  # the prompt of a row without text
        self.n_ids = self.nothing + 1
        self.n_positions: int = model.llm.config.max_position_embeddings  # of text and frames

    @property
    def device(self) -> torch.device:
        return self.model.audio_heads.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.audio_heads.weight.dtype

    def to_canvas(self, ids: list[int]) -> list[int]:
        """Ids of text in the numbering of canvases."""
        return [self.vocab_size + k for k in ids]

    def reserve(self, rows: int, cache_size: int) -> None:
        """There is no cache."""

    @torch.no_grad()
    def forward(self, entries: CanvasPass) -> Tensor:
        tokens, seen = entries.tokens, entries.reads[:, 0]
        is_slot = tokens < self.vocab_size  # [R, N], the columns of the canvas come last
        n_slots, n_seen = torch.stack([is_slot[0].sum(), (is_slot & seen).sum(1).max()]).tolist()
        first = tokens.shape[1] - n_slots
        n_frames = max(1, -(-n_seen // self.books))
        text = tokens[:, :first]
        frames = tokens[:, first:].unflatten(1, (-1, self.books))[:, :n_frames]
        is_frame = seen[:, first :: self.books][:, :n_frames]  # a row ends between frames
        is_there = torch.cat([seen[:, :first] & (text != self.nothing), is_frame], 1)
        words = (text - self.vocab_size).clamp(max=self._n_words - 1)
        states = self.model.states(words, frames, is_there)  # [R, n_frames, C]
        logits = self.model.logits(states).flatten(1, 2)  # [R, n_frames * Q, V]
        return gather_rows(logits, (entries.queries - first).clamp(max=logits.shape[1] - 1))
