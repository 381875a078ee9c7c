"""A Cosmos model with tiny random weights, under the names of the published files.

The transformer is written here once more, in plain PyTorch over the whole sequence, so that what
the library makes of its file can be compared. The codec is a pair of TorchScript files with the
published signature: a token is the mean colour of its block, in four steps a channel.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

SHAPE, VOCAB, THETA = (3, 2, 3), 64, 500000.0
TIME, SPACE = 8, 16


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, kept: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kept, self.head_dim = heads, kept, head_dim
        self.wq = nn.Linear(width, heads * head_dim, bias=False)
        self.wk = nn.Linear(width, kept * head_dim, bias=False)
        self.wv = nn.Linear(width, kept * head_dim, bias=False)
        self.wo = nn.Linear(heads * head_dim, width, bias=False)
        self.q_norm, self.k_norm = _Norm(head_dim), _Norm(head_dim)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        n = len(x)
        q = turn(self.q_norm(self.wq(x).view(n, self.heads, -1)), angles)
        k = turn(self.k_norm(self.wk(x).view(n, self.kept, -1)), angles)
        v = self.wv(x).view(n, self.kept, -1)
        made = []
        for head in range(self.heads):
            other = head * self.kept // self.heads
            scores = q[:, head] @ k[:, other].T / math.sqrt(self.head_dim)
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
            made.append(scores.softmax(-1) @ v[:, other])
        out: Tensor = self.wo(torch.cat(made, -1))
        return out


class _FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.w2(silu(self.w1(x)) * self.w3(x))
        return made


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, kept: int, head_dim: int, inner: int) -> None:
        super().__init__()
        self.attention = _Attention(width, heads, kept, head_dim)
        self.feed_forward = _FeedForward(width, inner)
        self.attention_norm, self.ffn_norm = _Norm(width), _Norm(width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        made: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return made


class Transformer(nn.Module):
    """The published one, of two layers; `yarn` as `clip_turns` takes it."""

    def __init__(self, yarn: dict[str, Any] | None = None, vocab_size: int = VOCAB) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.yarn, self.head_dim = yarn, 20
        self.tok_embeddings = nn.Embedding(vocab_size, 24)
        self.layers = nn.ModuleList(_Layer(24, 4, 2, self.head_dim, 40) for _ in range(2))
        self.norm, self.output = _Norm(24), nn.Linear(24, vocab_size, bias=False)
        with torch.no_grad():
            self.output.weight.mul_(6)  # so that tokens differ in likelihood

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[n, V]` of tokens `[n]`."""
        angles = clip_turns(self.head_dim, self.yarn)[: len(tokens)]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, angles)
        logits: Tensor = self.output(self.norm(x))
        return logits


def clip_turns(head_dim: int, yarn: dict[str, Any] | None = None) -> Tensor:
    """Angles `[T * H * W, head_dim / 2]`, token by token and pair by pair."""
    space = head_dim // 6 * 2
    axes = [head_dim - 2 * space, space, space]
    rows = []
    for t in range(SHAPE[0]):
        for y in range(SHAPE[1]):
            for x in range(SHAPE[2]):
                row = []
                for place, width, axis in zip((t, y, x), axes, range(3)):
                    for k in range(0, width, 2):
                        frequency = 1 / THETA ** (k / width)
                        if yarn is not None:
                            length = yarn["original_latent_shape"][min(axis, 1)]
                            high = 2 * math.pi * yarn["yarn_beta_fast"] / length
                            low = 2 * math.pi * yarn["yarn_beta_slow"] / length
                            kept = min(1.0, max(0.0, (frequency - low) / (high - low)))
                            frequency *= (1 - kept) / yarn["yarn_scale"] + kept
                        row.append(place * frequency)
                rows.append(row)
    return torch.tensor(rows)


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Heads `[n, heads, D]`, channel k turned with channel k + D / 2."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class _Encoder(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = x[:, :, :1]
        later = x[:, :, 1:].unflatten(2, (-1, 8)).mean(3)
        means = torch.cat((first, later), 2)
        means = means.unflatten(4, (-1, 16)).mean(5).unflatten(3, (-1, 16)).mean(4)
        steps = (means.float() * 2 + 2).floor().clamp(0, 3).int()  # [B, 3, t, h, w]
        tokens = steps[:, 0] + 4 * steps[:, 1] + 16 * steps[:, 2]
        return tokens, means, x.mean()


class _Decoder(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        steps = torch.stack((tokens % 4, tokens // 4 % 4, tokens // 16), 1)
        frames = (steps.float() - 1.5) / 2
        frames = frames.repeat_interleave(16, 3).repeat_interleave(16, 4)
        return torch.cat((frames[:, :, :1], frames[:, :, 1:].repeat_interleave(8, 2)), 2)


def build_codec(folder: Path) -> Path:
    """The codec's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, module in (("encoder.jit", _Encoder()), ("decoder.jit", _Decoder())):
        torch.jit.script(module).save(str(folder / name))
    return folder


def build_video(folder: Path, **config: Any) -> tuple[Path, Path]:
    """Folders of model and codec; `config` is written beside the shape of its clips."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    yarn = config if config.get("apply_yarn") else None
    weights = {f"model.{name}": value for name, value in Transformer(yarn).state_dict().items()}
    weights["model.layers.0.attention._extra_state"] = torch.zeros(0)
    torch.save({"model": weights}, model / "model.pt")
    text = json.dumps({"video_latent_shape": list(SHAPE)} | config)
    (model / "config.json").write_text(text, encoding="utf-8")
    return model, build_codec(folder / "codec")
