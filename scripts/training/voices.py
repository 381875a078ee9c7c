"""`voices`: a speech codec, and two small models over phonemes and its codes.

Codec: magnitudes of short-time spectra, without an adversary. R. Yamamoto, E. Song, J.-M. Kim,
"Parallel WaveGAN", 2019 (arXiv 1910.11480), equation 6: spectral convergence and L1 of log
magnitudes, and L1 of log mel spectrograms. Departures: one resolution, as the decoder writes
magnitudes, not sound. Half of each batch takes the flat layout, half the stacked one, whose rows
use a random number of books half of the time.

`flat`: a Llama over one stream of codes, as in Z. Ye et al., "Llasa: Scaling Train-Time and
Inference-Time Compute for Llama-based Speech Synthesis", 2025 (arXiv 2502.04128). Departures: the
text is phonemes; the codec is `mmaccel.tokenizers_vq.speech_codec`.

`depth`: transformers' `CsmForConditionalGeneration` (Sesame, "Crossing the uncanny valley of
conversational voice", 2025; the split is that of A. Défossez et al., "Moshi", 2024, arXiv
2410.00037, section 3.4.2): the temporal decoder reads a frame as one position and writes the first
book, the depth decoder writes the other books. Text and frames follow each other in one sequence.
A frame holds `STACK` of the codec's one after the other, 160 ms in 16 books (patches of frames that
one local decoder writes: Xiaomi, "MiMo-Audio: Audio Language Models are Few-Shot Learners", 2025,
section 2). Departures: the sound of the codes is the codec's, and the codec that the class holds is
a stub; a frame of end codes (`codebook_eos_token_id`, behind the codec's) ends the sound; the depth
decoder learns from all frames, not from one in sixteen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from mmaccel.pipelines.models.voices_vocabulary import END, PAD, list_prompt, list_tokens
from mmaccel.tokenizers_vq.mel import LogMel, mel_filters
from mmaccel.tokenizers_vq.speech_codec import SpeechCodec, SpeechCodecConfig, save_codec
from scripts.training.loop import IGNORE, Batch, Plan, Task, build_llama, pack
from scripts.training.voices_data import Pool
from scripts.training.voices_words import SPEAKERS

CODEC: dict[str, Any] = dict(
    sample_rate=16_000, hop=320, levels=[5, 5, 5, 4, 4], books=4, book_levels=[5, 5, 5, 4],
    encoder_width=96, encoder_depth=3, decoder_width=128, decoder_depth=2, fine_depth=4,
)  # fmt: skip
FLAT: dict[str, Any] = dict(
    hidden_size=192, intermediate_size=512, num_hidden_layers=5, num_attention_heads=3,
    max_position_embeddings=512, tie_word_embeddings=True,
)  # fmt: skip
TEMPORAL: dict[str, Any] = dict(
    hidden_size=96, intermediate_size=192, num_hidden_layers=5, num_attention_heads=3,
    num_key_value_heads=3, max_position_embeddings=160,
)  # fmt: skip
DEPTH: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=2,
)  # fmt: skip
STACK = 4
"""The codec's frames in one of the model with a depth decoder."""
PLANS = {
    "codec": Plan(4000, 2000, 12, rate_rest=1e-3, warmup=200, average=0, mixed=True),
    "flat": Plan(5200, 2000, 32, mixed=True),
    "depth": Plan(12000, 2000, 32, mixed=True),
}
POOLS = {"codec": (21, 1500), "train": (11, 32_000), "validation": (12, 1000)}  # seed, utterances
_BANDS = 60
_FLOOR = 1e-2  # added to magnitudes, whose noise is at about 0.1
_SEGMENT = 12_800
_MEL_WEIGHT = 4.0
_GROUP = 16  # batches whose rows are sorted by length together
_NO_TEXT = -1


class Codec(Task):
    """Pieces of sound to the magnitudes of their spectra."""

    def __init__(self, pool: Pool, held_out: Pool) -> None:
        self.pool = pool
        self.checked = draw_segments(held_out, (0, 0), 24)

    def build(self, before: Path | None) -> SpeechCodec:
        return SpeechCodec(SpeechCodecConfig(**CODEC))

    def batch(self, step: int, size: int) -> Batch:
        """Sound [B, samples], and how many books each row uses, 0 for the flat layout [B]."""
        rng = np.random.default_rng((2, step))
        books = CODEC["books"]
        is_cut = rng.random(size) < 0.5
        kept = np.where(is_cut, rng.integers(1, books + 1, size=size), books)
        kept[::2] = 0
        return draw_segments(self.pool, (1, step), size), torch.from_numpy(kept)

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        made = model(ids, labels == 0, labels.clamp(min=1))
        return spectral_loss(model, made, model.target(ids))

    def validate(self, model: Any, device: str) -> dict[str, float]:
        """Mean absolute differences of log mel spectrograms (80 bands, 16 ms), in nats."""
        sound = self.checked.to(device)
        codes = model.encode(sound)
        stacked = model.decode_stacked(model.encode_stacked(sound))
        mel = LogMel(model.sample_rate, 256)
        made = {"flat": model.decode(codes), "stacked": stacked}
        real = mel(self.checked)
        return {name: float((mel(own.cpu()) - real).abs().mean()) for name, own in made.items()}

    def save(self, model: Any, folder: Path) -> None:
        save_codec(model, folder)


def draw_segments(pool: Pool, seed: tuple[int, int], count: int) -> Tensor:
    """[count, samples] float32: random places of the pool, at random loudness."""
    rng = np.random.default_rng(seed)
    begins = rng.integers(len(pool.sound) - _SEGMENT, size=count)
    rows = np.stack([pool.sound[begin : begin + _SEGMENT] for begin in begins])
    gains = rng.uniform(0.6, 1.3, size=(count, 1)).astype(np.float32) / 32768
    return torch.from_numpy(rows.astype(np.float32) * gains)


def spectral_loss(codec: SpeechCodec, logs: Tensor, real: Tensor) -> Tensor:
    """Distance of logarithms of magnitudes to magnitudes, both [B, T, bins] of one codec."""
    made = logs.float().exp()
    filters = mel_filters(_BANDS, codec.n_fft, codec.sample_rate).T.to(real.device)
    convergence = (real - made).norm() / real.norm()
    fine = ((made + _FLOOR).log() - (real + _FLOOR).log()).abs().mean()
    one, other = (magnitudes @ filters + _FLOOR / 10 for magnitudes in (made, real))
    return convergence + fine + _MEL_WEIGHT * (one.log() - other.log()).abs().mean()


class SpokenText:
    """Prompts and codes of a pool, in batches of rows of like length, epoch by epoch.

    Attributes:
        prompts: ids of each utterance's text.
        codes: of each utterance, [F / 2, 2 + Q] int64: two flat codes of 20 ms, then the books of
            the same 40 ms.
    """

    def __init__(self, pool: Pool, codec: SpeechCodec, file: Path, seed: int = 0) -> None:
        tokens = list_tokens(codec.flat_size, SPEAKERS, pool.lexicon)
        ids = {token: k for k, token in enumerate(tokens)}
        self.vocab_size, self.pad, self.end = len(tokens), ids[PAD], ids[END]
        self.prompts = []
        for sentence, speaker in zip(pool.sentences, pool.speakers, strict=True):
            names = list_prompt(SPEAKERS[speaker], [pool.lexicon[word] for word in sentence])
            self.prompts.append([ids[name] for name in names])
        if not file.exists():
            torch.save([encode(codec, pool.utterance(k)) for k in range(len(pool))], file)
        self.codes: list[Tensor] = torch.load(file)
        self.seed = seed
        both = zip(self.codes, self.prompts, strict=True)
        self.lengths = np.array([2 * len(codes) + len(prompt) for codes, prompt in both])

    def rows(self, step: int, size: int) -> np.ndarray:
        """[size] utterances of batch `step`: rows are shuffled, groups of them sorted by length,
        and their batches shuffled.
        """
        epoch, k = divmod(step, len(self.prompts) // size)
        rng = np.random.default_rng((self.seed, epoch))
        rows = rng.permutation(len(self.prompts))
        for begin in range(0, len(rows), _GROUP * size):
            group = rows[begin : begin + _GROUP * size]
            group[:] = group[np.argsort(self.lengths[group], kind="stable")]
        batches: np.ndarray = rng.permutation(rows[: len(rows) // size * size].reshape(-1, size))
        return batches[k]


@torch.no_grad()
def encode(codec: SpeechCodec, sound: Tensor) -> Tensor:
    """The codes of a sound in both layouts, see `SpokenText`."""
    features = codec.features(sound[None])
    flat = codec.flat.encode(codec.to_flat(features))[0].view(-1, 2)
    return torch.cat([flat, codec.encode_features(features)[0]], 1)


class Flat(Task):
    """Utterances read code by code; `checks` validation utterances in batches of 20."""

    def __init__(self, text: SpokenText, held_out: SpokenText, checks: int = 400) -> None:
        self.text = text
        firsts = range(0, checks, 20)
        self.checks = [pack_flat(held_out, np.arange(k, k + 20)) for k in firsts]

    def build(self, before: Path | None) -> Any:
        text = self.text
        ends: Any = dict(bos_token_id=None, eos_token_id=text.end, pad_token_id=text.pad)
        return build_llama(vocab_size=text.vocab_size, **ends, **FLAT)

    def batch(self, step: int, size: int) -> Batch:
        return pack_flat(self.text, self.text.rows(step, size))


def pack_flat(text: SpokenText, rows: np.ndarray) -> Batch:
    """Prompts, and flat codes and end tokens, which are learnt."""
    said = []
    for row in rows.tolist():
        codes = [*text.codes[row][:, :2].flatten().tolist(), text.end]
        said.append([(text.prompts[row], False), (codes, True)])
    return pack(said, text.pad)


class Depth(Task):
    """Utterances read frame by frame."""

    def __init__(
        self, text: SpokenText, held_out: SpokenText, codec: SpeechCodec, checks: int = 400
    ) -> None:
        self.text, self.codec = text, codec
        quiet = torch.zeros(1, 8 * codec.hop)
        self.silence = codec.encode_stacked(quiet)[0, 1]  # [Q], a frame of it
        none = np.zeros(20, dtype=np.int64)
        firsts = range(0, checks, 20)
        self.checks = [self.pack(held_out, np.arange(k, k + 20), none) for k in firsts]

    def build(self, before: Path | None) -> Any:
        from transformers import CsmConfig, CsmForConditionalGeneration

        books, size = STACK * self.codec.books, self.codec.book_size
        none: Any = dict.fromkeys(
            ("bos_token_id", "eos_token_id", "audio_token_id", "audio_eos_token_id")
        )
        depth = {"num_codebooks": books, "vocab_size": size + 2, **DEPTH}
        depth |= {"backbone_hidden_size": TEMPORAL["hidden_size"]}
        stub = {"model_type": "mimi", "num_quantizers": books, "upsampling_ratios": [2]}
        stub |= dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 8)
        stub |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "upsample_groups"), 1)
        stub |= dict.fromkeys(("num_filters", "codebook_size", "codebook_dim"), 2)
        stub |= {"num_key_value_heads": 1, "vector_quantization_hidden_dimension": 2}
        return CsmForConditionalGeneration(
            CsmConfig(
                num_codebooks=books,
                vocab_size=size + 2,
                text_vocab_size=self.text.vocab_size - self.codec.flat_size,
                pad_token_id=self.text.pad - self.codec.flat_size,
                codebook_eos_token_id=size,
                codebook_pad_token_id=size + 1,
                depth_decoder_config=depth | {"max_position_embeddings": books + 1},
                codec_config=stub,
                **none,
                **TEMPORAL,
            )
        )

    def batch(self, step: int, size: int) -> Batch:
        """Up to `STACK` - 1 frames of silence make more out of an utterance."""
        before = np.random.default_rng((1, step)).integers(STACK, size=size)
        return self.pack(self.text, self.text.rows(step, size), before)

    def pack(self, text: SpokenText, rows: np.ndarray, before: np.ndarray) -> Batch:
        """Prompts, frames and a frame of ends, of utterances [B] with so many frames of silence
        before.

        Returns:
            ids [B, T, 1 + Q]: text or `_NO_TEXT`, then the codes of a frame; and labels [B, T, Q],
            `IGNORE` but on frames.
        """
        texts, frames, labels = [], [], []
        for row, begin in zip(rows.tolist(), before.tolist(), strict=True):
            prompt = torch.tensor(text.prompts[row]) - self.codec.flat_size
            own = stack_frames(text.codes[row][:, 2:], self.silence, begin)
            own = torch.cat([own, torch.full_like(own[:1], self.codec.book_size)])
            nothing = own.new_zeros(len(prompt), own.shape[1])
            texts.append(torch.cat([prompt, torch.full_like(own[:, 0], _NO_TEXT)]))
            frames.append(torch.cat([nothing, own]))
            labels.append(torch.cat([nothing + IGNORE, own]))
        words = pad_sequence(texts, True, text.pad - self.codec.flat_size)
        ids = torch.cat([words[..., None], pad_sequence(frames, True)], -1)
        return ids, pad_sequence(labels, True, IGNORE)

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        return book_losses(model, ids, labels).mean()


def stack_frames(codes: Tensor, silence: Tensor, before: int = 0) -> Tensor:
    """`STACK` frames of the codec [F, Q] to one of the model, filled with silence [Q]:
    [ceil((before + F) / STACK), STACK * Q], the first frame's books first.
    """
    after = -(before + len(codes)) % STACK
    filled = torch.cat([silence.expand(before, -1), codes, silence.expand(after, -1)])
    return filled.reshape(-1, STACK * codes.shape[1])


def book_losses(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of each book, [Q] nats, of ids and labels of `Depth.pack`."""
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
