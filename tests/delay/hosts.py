"""Models of several codebooks a step, as tests call them, with a policy or without."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import AttachError
from mmaccel.evaluation.exactness.g_test import g_test
from tests.delay import models
from tests.delay.models import AUDIO, AUDIO_BEGIN, AUDIO_DELAY, MASK, TEXT, delay_prompt
from tests.delay.models import HIGGS_PADDING as PADDING

BITWISE = [
    mmaccel.Autoregressive(),
    mmaccel.Jacobi(window=3),
    mmaccel.Jacobi(window=11, drafts="previous-frame"),
]
WIDE = BITWISE[-1]
SJD = mmaccel.SpeculativeJacobi(window=8)


class Host:
    """A model and the arguments of its call.

    Args:
        model: whose `generate` makes codes.
        usual: arguments of a call that says nothing else; None was not given.
    """

    def __init__(self, model: Any, **usual: Any) -> None:
        self.model = model
        self.usual = usual

    def generate(self, **options: Any) -> Any:
        """What the model's `generate` returns."""
        given = self.usual | options
        return self.model.generate(**{k: v for k, v in given.items() if v is not None})

    def call(self, **options: Any) -> Any:
        """The codes `[B, S, K]`, or the object that has them."""
        return self.generate(**options)

    def attached(self, policy: Any, seed: Any = 3, **options: Any) -> tuple[Any, mmaccel.Stats]:
        """The same under a policy, and the statistics."""
        with mmaccel.attach(self.model, policy, seed=seed, strict=True) as handle:
            made = self.call(**options)
        assert handle.stats is not None and not handle.stats.fallbacks
        return made, handle.stats

    def take_row(self, row: int) -> dict[str, Any]:
        """The arguments of a call of one of the usual rows alone."""
        return {
            name: value[row : row + 1]
            for name, value in self.usual.items()
            if isinstance(value, Tensor)
        }

    def count_steps(self, made: Tensor) -> int:
        """Steps of a sound, that of the begin ids included."""
        return made.shape[1]


class Music(Host):
    """MusicGen; its codes `[B, K, T]` are what its codec is asked to decode."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, input_ids=TEXT, attention_mask=MASK, max_length=9)
        self.found: list[Tensor] = []
        model.audio_encoder.decode = self._decode

    def _decode(self, codes: Tensor, **_: Any) -> Any:
        self.found.append(codes)
        return SimpleNamespace(audio_values=codes.float().flatten(1))

    def call(self, **options: Any) -> Tensor:
        self.found.clear()
        self.generate(**options)
        return torch.cat([codes[0] for codes in self.found], 1)  # both channels

    def count_steps(self, made: Tensor) -> int:
        decoder = self.model.decoder
        return made.shape[2] + decoder.num_codebooks // decoder.config.audio_channels


class Higgs(Host):
    """Higgs Audio v2; a row alone has no padding."""

    def take_row(self, row: int) -> dict[str, Any]:
        ids = self.usual["input_ids"][row]
        alone = ids[ids != PADDING][None]
        return {"input_ids": alone, "attention_mask": torch.ones_like(alone)}


NO_SOUND = delay_prompt(torch.zeros(3, 0, len(models.DIA_DELAYS), dtype=torch.int64))


def make_dia_host(*args: Any) -> Host:
    """Dia with three texts, padded behind."""
    text = {"input_ids": TEXT.flip(1), "attention_mask": MASK.flip(1)}
    return Host(models.make_dia(*args), **text, **NO_SOUND, max_length=10)


IDS = torch.tensor([[PADDING, PADDING, 5, 7, AUDIO_BEGIN], [3, 4, 9, 2, AUDIO_BEGIN]])


def make_higgs_host(*args: Any) -> Host:
    """Higgs with two texts, padded in front."""
    mask = IDS != PADDING
    return Higgs(models.make_higgs(*args), input_ids=IDS, attention_mask=mask, max_new_tokens=12)


_MAKERS: dict[str, Callable[[], Host]] = {
    "musicgen": lambda: Music(models.make_musicgen()),
    "stereo": lambda: Music(models.make_musicgen(channels=2)),
    "melody": lambda: Music(models.make_musicgen(melody=True)),
    "dia": make_dia_host,
    "higgs": make_higgs_host,
}
HOSTS = list(_MAKERS)
CLASSES = ["musicgen", "melody", "dia", "higgs"]
"""Hosts without variants of a class."""


def make_host(name: str) -> Host:
    return _MAKERS[name]()


@cache
def open_host(name: str) -> Host:
    """A host that tests must not change."""
    return make_host(name)


_CLONE = torch.tensor([
    [PADDING, PADDING, 5, AUDIO, AUDIO, AUDIO, 7, 3, 6, AUDIO_BEGIN],
    [3, 4, 9, AUDIO, AUDIO, AUDIO, AUDIO_DELAY, 2, 7, AUDIO_BEGIN],
])  # fmt: skip
VOICE = {
    "input_ids": _CLONE,
    "attention_mask": _CLONE != PADDING,
    "audio_input_ids": torch.arange(2 * 4 * models.HIGGS_BOOKS).view(2, 4, -1) % 12,
    "audio_input_ids_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool(),
}
_MUSIC: dict[str, dict[str, Any]] = {
    "plain": {},
    "guided": {"guidance_scale": 3.0},
    "begun": {"decoder_input_ids": torch.arange(3 * models.BOOKS * 3).view(-1, 3) % models.CODES},
    "too short for the pattern": {"max_length": 2},
}
_DIA: dict[str, dict[str, Any]] = {
    "plain": {},
    "guided": {"guidance_scale": 3.0, "top_k": 5},
    "guided without a limit": {"guidance_scale": 3.0, "top_k": None},
    "begun": delay_prompt(torch.arange(3 * 2 * 3).view(3, 2, 3) % 16),
    "without delays": {"decoder_input_ids": None, "decoder_attention_mask": None},
    "cut": {"max_length": 4},
}
_HIGGS: dict[str, dict[str, Any]] = {
    "text": {},
    "a voice": VOICE,
    "without a begin": {"input_ids": IDS[:, :-1], "attention_mask": IDS[:, :-1] != PADDING},
    "begun": {
        "input_ids": torch.cat([IDS, torch.full((2, 2), AUDIO)], 1),
        "attention_mask": torch.cat([IDS, IDS[:, -2:]], 1) != PADDING,
        "audio_input_ids": torch.tensor([[[12, 12, 12], [3, 12, 12]]] * 2),
        "audio_input_ids_mask": torch.ones(2, 2, dtype=torch.bool),
    },
    "cut": {"max_new_tokens": 4},
}
CALLS = {
    "musicgen": _MUSIC,
    "stereo": {name: _MUSIC[name] for name in ("guided", "begun")},
    "melody": {name: _MUSIC[name] for name in ("guided", "begun")},
    "dia": _DIA,
    "higgs": _HIGGS,
}


def assert_same_distribution(
    host: Host, options: dict[str, Any], drawn: Tensor, chances: Tensor
) -> None:
    """G-tests of sounds under two policies against the distribution of those that the model drew,
    over these and all others together.

    Args:
        host: the model.
        options: of the call.
        drawn: `[N, S, K]`, codes of its own loop.
        chances: `[N]` float64, the probability of each.
    """
    known, where = torch.unique(drawn.flatten(1), dim=0, return_inverse=True)
    expected = torch.zeros(len(known), dtype=torch.float64).scatter_(0, where, chances)
    rest = (1 - expected.sum()).clamp(min=0)
    expected = torch.cat([expected, rest[None]])
    for policy in (
        mmaccel.SpeculativeJacobi(window=4),
        mmaccel.Speculative(window=3, drafts="ngram"),
    ):
        made, _ = host.attached(policy, seed=11, **options)
        counts = (made.flatten(1)[:, None] == known).all(-1).sum(0)
        other = len(made) - counts.sum(0, keepdim=True)
        found = g_test(torch.cat([counts, other]), expected)
        assert found.degrees > 15 and found.p_value > 1e-3


def is_refused(host: Host, says: str, **options: Any) -> bool:
    """Whether a call is refused, with what was expected, what was received, and a remedy."""
    whole = f"^generate: expected .* received .*{says}.*; leave that out, or attach with"
    with mmaccel.attach(host.model, "jacobi", strict=True):
        try:
            host.call(**options)
        except AttachError as error:
            return re.search(whole, str(error)) is not None
    return False
