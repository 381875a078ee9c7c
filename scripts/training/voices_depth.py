"""`voices` with several codes a frame: a temporal and a depth decoder, and their training task.

transformers' `CsmForConditionalGeneration` (Sesame, "Crossing the uncanny valley of conversational
voice", 2025; the split is that of A. Défossez et al., "Moshi", 2024, arXiv 2410.00037, section
3.4.2): the temporal decoder reads a frame as one position and writes the first book, the depth
decoder writes the other books. Text and frames follow each other in one sequence. A frame holds
`STACK` of the codec's one after the other, 160 ms in 16 books (patches of frames that one local
decoder writes: Xiaomi, "MiMo-Audio: Audio Language Models are Few-Shot Learners", 2025, section 2).

Departures: the sound of the codes is `mmaccel.tokenizers_vq.speech_codec`'s, and the codec that the
class holds is a stub; a frame of end codes (`codebook_eos_token_id`, behind the codec's) ends the
sound; the depth decoder learns from all frames, not from one in sixteen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmaccel.tokenizers_vq.speech_codec import SpeechCodec, load_codec
from scripts.training.data import IGNORE
from scripts.training.voices import SpokenText

STACK = 4
"""The codec's frames in one of the model's."""
WIDTH = 96
DEPTH = 5
HEADS = 3
INNER = 192
DEPTH_WIDTH = 64
DEPTH_DEPTH = 3
DEPTH_HEADS = 2
DEPTH_INNER = 128
LONGEST = 160
"""Positions: a prompt and about eight seconds of frames."""
_NO_TEXT = -1


def build_model(books: int, book_size: int, text: int, pad: int) -> Any:
    """A new `CsmForConditionalGeneration` with random weights, float32.

    Args:
        books: Q.
        book_size: codes of a book; the end and padding are the next ids.
        text: tokens of the text's side.
        pad: padding of the text's side.
    """
    from transformers import CsmConfig, CsmForConditionalGeneration

    depth = {
        "num_codebooks": books,
        "backbone_hidden_size": WIDTH,
        "vocab_size": book_size + 2,
        "hidden_size": DEPTH_WIDTH,
        "intermediate_size": DEPTH_INNER,
        "num_hidden_layers": DEPTH_DEPTH,
        "num_attention_heads": DEPTH_HEADS,
        "num_key_value_heads": DEPTH_HEADS,
        "max_position_embeddings": books + 1,
    }
    stub = {
        "model_type": "mimi",
        "num_filters": 2,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "upsampling_ratios": [2],
        "codebook_size": 2,
        "codebook_dim": 2,
        "num_quantizers": books,
        "vector_quantization_hidden_dimension": 2,
        "upsample_groups": 1,
    }
    return CsmForConditionalGeneration(
        CsmConfig(
            num_codebooks=books,
            vocab_size=book_size + 2,
            text_vocab_size=text,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=DEPTH,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=LONGEST,
            pad_token_id=pad,
            bos_token_id=None,
            eos_token_id=None,
            audio_token_id=None,
            audio_eos_token_id=None,
            codebook_eos_token_id=book_size,
            codebook_pad_token_id=book_size + 1,
            depth_decoder_config=depth,
            codec_config=stub,
        )
    )


def stack_frames(codes: np.ndarray, silence: np.ndarray, before: int = 0) -> np.ndarray:
    """`STACK` frames of the codec to one of the model, filled with silence.

    Args:
        codes: [F, Q] of the codec.
        silence: [Q], a frame of it.
        before: frames of silence at the beginning.

    Returns:
        [ceil((before + F) / STACK), STACK * Q], the first frame's books first.
    """
    after = -(before + len(codes)) % STACK
    filled = np.concatenate(
        [silence[None].repeat(before, 0), codes, silence[None].repeat(after, 0)]
    )
    return filled.reshape(-1, STACK * codes.shape[1])


class Frames:
    """Prompts and stacked codes of a pool.

    Args:
        text: the pool.
        codec: its flat codes are the ids before those of the prompts.
    """

    def __init__(self, text: SpokenText, codec: SpeechCodec) -> None:
        self.text = text
        self.prompts = [np.array(prompt) - codec.flat_size for prompt in text.prompts]
        self.vocab_size = text.vocab_size - codec.flat_size
        self.pad = text.pad - codec.flat_size
        self.end = codec.book_size
        quiet = torch.zeros(1, 8 * codec.hop)
        self.silence: np.ndarray = codec.encode_stacked(quiet)[0, 1].numpy()

    def pack(self, rows: np.ndarray, before: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Prompts, frames and a frame of ends.

        Args:
            rows: [B] utterances.
            before: [B] frames of silence at their beginnings; None: none.

        Returns:
            ids [B, T, 1 + Q]: text or `_NO_TEXT`, then the codes of a frame; and labels [B, T, Q],
            `IGNORE` but on frames.
        """
        parts = []
        begins = np.zeros_like(rows) if before is None else before
        for row, begin in zip(rows.tolist(), begins.tolist(), strict=True):
            codes = self.text.frames(row)[:, 2:].astype(np.int64)
            frames = stack_frames(codes, self.silence, begin)
            parts.append((self.prompts[row], np.pad(frames, ((0, 1), (0, 0)), constant_values=-1)))
        width = max(len(prompt) + len(frames) for prompt, frames in parts)
        books = parts[0][1].shape[1]
        ids = torch.zeros(len(rows), width, 1 + books, dtype=torch.int64)
        ids[..., 0] = self.pad
        labels = torch.full((len(rows), width, books), IGNORE)
        for b, (prompt, frames) in enumerate(parts):
            n, end = len(prompt), len(prompt) + len(frames)
            frames[-1] = self.end
            ids[b, :n, 0] = torch.from_numpy(prompt)
            ids[b, n:end, 0] = _NO_TEXT
            ids[b, n:end, 1:] = labels[b, n:end] = torch.from_numpy(frames)
        return ids, labels


def book_losses(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of each book, [Q] nats.

    Args:
        model: of `build_model`.
        ids, labels: of `Frames.pack`.
    """
    words = model.embed_text_tokens(ids[:, :-1, 0].clamp(min=0))
    sound = model.backbone_model.embed_tokens(ids[:, :-1, 1:])
    is_text = (ids[:, :-1, :1] != _NO_TEXT).to(words.dtype)
    inputs = words * is_text + sound * (1 - is_text)  # [B, T - 1, C]
    hidden = model.backbone_model(inputs_embeds=inputs, use_cache=False).last_hidden_state
    target = labels[:, 1:]
    chosen = target[..., 0] != IGNORE
    before = hidden[chosen]  # [N, C], the position before each frame
    frames = target[chosen]  # [N, Q]
    first = cross_entropy(model.lm_head(before).float(), frames[:, 0])
    given = torch.nn.functional.pad(frames[:, :-1], (1, 0))  # the first is the hidden state
    logits = model.depth_decoder(
        input_ids=given, backbone_last_hidden_state=before, use_cache=False
    ).logits  # [N, Q - 1, V]
    others = cross_entropy(logits.float().mT, frames[:, 1:], reduction="none").mean(0)
    return torch.cat([first[None], others])


class VoicesDepth:
    """Utterances of a work folder, read frame by frame; see `scripts.training.generator.Task`.

    Args:
        work: of `python -m scripts.training voices-data`.
        checks: validation utterances, in batches of 20.
    """

    def __init__(self, work: str | Path, checks: int = 400) -> None:
        self.options: dict[str, Any] = {}
        codec = load_codec(Path(work) / "codec")
        self.books = STACK * codec.books
        self.book_size = codec.book_size
        self.data = Frames(SpokenText(work, "train", codec.flat_size), codec)
        held_out = Frames(SpokenText(work, "validation", codec.flat_size), codec)
        self.checks = [held_out.pack(np.arange(k, k + 20)) for k in range(0, checks, 20)]

    def build(self, start: str | None) -> Any:
        """See `Task`."""
        from transformers import CsmForConditionalGeneration

        model = build_model(self.books, self.book_size, self.data.vocab_size, self.data.pad)
        if start is not None:
            found = CsmForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
            model.load_state_dict(found.state_dict())
        return model

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """See `Task`: up to `STACK` - 1 frames of silence make more out of an utterance."""
        before = np.random.default_rng((1, step)).integers(STACK, size=size)
        return self.data.pack(self.data.text.rows(step, size), before)

    def distinct(self, steps: int, size: int) -> int:
        """See `Task`."""
        return min(steps * size, len(self.data.text))

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        """See `Task`."""
        return book_losses(model, ids, labels).mean()

    @torch.no_grad()
    def validate(self, model: Any, device: str) -> dict[str, float]:
        """See `Task`: nats a code, of all books and of each."""
        model.eval()
        found = [book_losses(model, i.to(device), y.to(device)) for i, y in self.checks]
        model.train()
        books = torch.stack(found).mean(0).tolist()
        figures = {f"book {k}": loss for k, loss in enumerate(books)}
        return {"validation": sum(books) / len(books)} | figures
