"""Reference models: distributions small enough for a table, so that every probability is known.

`ReferenceDenoiser` knows every conditional of a joint distribution. `ToyLanguage`
is a token model whose logits come from a table over prefixes, so that a sampler that forgets to
roll back, or forwards the wrong position, reads the wrong prefix. The probability of every whole
sequence is a product of softmaxes; counts of sampled sequences are compared with it by
`mmaccel.evaluation.exactness.g_test`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass, Denoiser, Pass, Prompt, TokenModel
from mmaccel.evaluation.exactness.g_test import GTest, count_sequences, g_test
from mmaccel.samplers.drafting.coarse import Coarse
from mmaccel.samplers.drafting.coarse_model import CoarseConfig, CoarseModel, save_coarse
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams

LENGTH, VOCAB = 5, 3
_DEPTH = 7  # tokens that count: the prompt and all others
_PROMPT = (1, 2)


_FACTS = (
    "vocab_size max_positions model mask_token block supports_kv_cache kv_cache_reason any_rows "
    "is_self_checked"
).split()


class WrappedDenoiser(Denoiser):
    """A denoiser over another one, for children that look at its passes.

    Args:
        inner: computes.
    """

    def __init__(self, inner: Denoiser) -> None:
        self.inner = inner
        vars(self).update({name: getattr(inner, name) for name in _FACTS})

    @property
    def device(self) -> torch.device:
        """The inner one's."""
        return self.inner.device

    @property
    def activation_format(self) -> str:
        """The inner one's."""
        return self.inner.activation_format

    def reserve(self, rows: int, positions: int) -> None:
        self.inner.reserve(rows, positions)

    def forward(self, entries: CanvasPass) -> Tensor:
        return self.inner.forward(entries)


class ReferenceDenoiser(Denoiser):
    """A joint distribution over L slots of V tokens; id V is the mask token.

    Args:
        joint: `[V] * L`, non-negative, float64.
    """

    any_rows = True

    def __init__(self, joint: Tensor) -> None:
        self.joint = joint.double() / joint.sum()
        self.length, self.n_tokens = joint.ndim, joint.shape[0]
        self.vocab_size, self.mask_token = self.n_tokens + 1, self.n_tokens
        self.passes = 0
        self.table = torch.tensor(
            list(product(range(self.n_tokens), repeat=self.length)), dtype=torch.int64
        )

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def reserve(self, rows: int, cache_size: int) -> None:
        self.rows = rows

    def forward(self, entries: CanvasPass) -> Tensor:
        """Logarithms of the joint's conditionals, float64; of what cannot be: -inf everywhere."""
        self.passes += 1
        canvas = entries.tokens[:, -self.length :]  # [R, L]
        agrees = (canvas[:, None] == self.table) | (canvas[:, None] == self.mask_token)
        weight = agrees.all(-1) * self.joint.flatten()  # [R, V ** L]
        is_token = torch.nn.functional.one_hot(self.table, self.vocab_size).double()
        mass = torch.einsum("rk,klv->rlv", weight, is_token)
        slots = entries.queries - (entries.tokens.shape[1] - self.length)
        index = slots.clamp(0)[..., None].expand(-1, -1, self.vocab_size)
        return mass.gather(1, index).log()


def families(length: int = 4, n_tokens: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """Joint distributions `[V] * L`, float64, of six kinds: slots that know nothing of each other,
    a chain, noisy copies, permutations, one slot changed, and a few templates (after W. Kang et
    al., "ParallelBench", 2025, arXiv 2510.04767).
    """
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int, sharp: float = 1.5) -> Tensor:
        return (sharp * torch.randn(*shape, generator=rng, dtype=torch.float64)).softmax(-1)

    table = list(product(range(n_tokens), repeat=length))
    shape = (n_tokens,) * length
    single = draw(length, n_tokens)
    independent = _exactly([_prod(single[i, x] for i, x in enumerate(row)) for row in table])
    first, step = draw(n_tokens), draw(n_tokens, n_tokens)
    markov = _exactly(
        [first[r[0]] * _prod(step[a, b] for a, b in zip(r, r[1:], strict=False)) for r in table]
    )
    noise = 0.05
    half = length // 2
    copies = _exactly(
        [
            _prod(
                (1 - noise if r[i] == r[i + half] else noise) * single[i, r[i]] for i in range(half)
            )
            for r in table
        ]
    )
    pattern = [k % n_tokens for k in range(length)]
    shuffles = set(permutations(pattern))
    shuffle = _exactly([float(r in shuffles) for r in table])
    base = tuple([0] * length)
    changed = {base[:i] + (v,) + base[i + 1 :] for i in range(length) for v in range(1, n_tokens)}
    replace = _exactly([float(r in changed) for r in table])
    picks = torch.randperm(len(table), generator=rng)[:3].tolist()
    templates = _exactly(
        [0.01 / len(table) + (0.33 if k in picks else 0) for k in range(len(table))]
    )
    joints = {
        "independent": independent,
        "markov": markov,
        "copy pairs": copies,
        "shuffle": shuffle,
        "replace one": replace,
        "templates": templates,
    }
    return {name: value.double().view(shape) / value.sum() for name, value in joints.items()}


def _exactly(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _prod(values) -> float:  # type: ignore[no-untyped-def]
    result = 1.0
    for value in values:
        result *= float(value)
    return result


class ToyLanguage(TokenModel):
    """A `TokenModel` over ids 0..2 whose logits depend on all tokens before.

    Its hidden states are its logits; see `mmaccel.samplers.drafting.states.StateModel`.

    Args:
        seed: of the table.
        spread: standard deviation of the logits.
    """

    vocab_size = VOCAB
    device = torch.device("cpu")

    def __init__(self, seed: int = 1, spread: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        n_prefixes = (VOCAB + 1) ** _DEPTH  # digit 0: nothing stands there
        self.table = spread * torch.randn(
            n_prefixes, VOCAB, generator=generator, dtype=torch.float32
        )
        self.last_states: Tensor | None = None
        self.coarse: Path | None = None

    def keep_states(self, wanted: bool) -> None:
        """See `mmaccel.samplers.drafting.states.StateModel.keep_states`; they always are."""

    def output_matrix(self) -> Tensor:
        return torch.eye(VOCAB, dtype=torch.float32)

    def embeddings(self) -> Tensor:
        """As in `TokenModel`: the middle one lies near the two others, which are apart."""
        return torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]], dtype=torch.float32)

    def reserve(self, rows: int, positions: int) -> None:
        self._capacity = positions
        self._tokens = torch.full(
            (rows, positions + 1), -1, dtype=torch.int64
        )  # the last column: positions past the end

    def prefill(self, entries: Pass) -> None:
        self._write(entries)

    def forward(self, entries: Pass) -> Tensor:
        """Logits `[R, W, 3]` float32; see `mmaccel.contracts.TokenModel.forward`."""
        positions = self._write(entries)
        after = [self.logits_after(self._tokens, p) for p in positions.unbind(1)]
        self.last_states = torch.stack(after, 1)
        return self.last_states

    def logits_after(self, memory: Tensor, last: Tensor) -> Tensor:
        """Logits `[R, 3]` after the prefixes `memory[r, : last[r] + 1]`."""
        code = torch.zeros_like(last)
        for back in range(_DEPTH - 1, -1, -1):
            position = last - back
            token = memory.gather(1, position.clamp(min=0)[:, None])[:, 0]
            code = code * (VOCAB + 1) + torch.where(position >= 0, token + 1, 0)
        return self.table[code]

    def _write(self, entries: Pass) -> Tensor:
        tokens, start = entries.tokens, entries.start
        assert start is not None
        positions = start[:, None] + torch.arange(tokens.shape[1])
        positions = positions.clamp(max=self._capacity)
        self._tokens.scatter_(1, positions, tokens)
        return positions

    def distribution(self) -> Tensor:
        """Probability of each sequence of 5 tokens after the prompt, `[243]` float64, in the order
        of `itertools.product`.
        """
        chances = []
        for tokens in product(range(VOCAB), repeat=LENGTH):
            token_buffer = torch.tensor([[*_PROMPT, *tokens]], dtype=torch.int64)
            chance = 1.0
            for slot, token in enumerate(tokens):
                last = torch.tensor([len(_PROMPT) + slot - 1], dtype=torch.int64)
                chance *= float(
                    self.logits_after(token_buffer, last)[0].double().softmax(-1)[token]
                )
            chances.append(chance)
        return torch.tensor(chances, dtype=torch.float64)


def sample_distribution(policy: Any, samples: int, seed: int = 0) -> GTest:
    """Sample the language under a policy and compare the counts with its distribution.

    A coarse model of another model cannot draft the language's tokens: a random one does instead.

    Args:
        policy: one that decodes a window.
        samples: rows of one batch, so that rows advance differently.
        seed: of all draws.
    """
    drafts = getattr(policy, "drafts", None)
    if not isinstance(drafts, Coarse) and drafts != "coarse":
        return _sample(policy, samples, seed)
    with TemporaryDirectory() as folder:
        save_coarse(_random_coarse(), folder, {})
        return _sample(replace(policy, drafts=Coarse(folder, candidates=1)), samples, seed)


def _random_coarse() -> CoarseModel:
    """Changes scores by about two nats; with one neighbour, some drafts stay the coupling's."""
    sizes: dict[str, Any] = {"embedding": VOCAB, "width": 8, "reach": 4}
    config = CoarseConfig(VOCAB, VOCAB, ((0, 0, -1),), **sizes)
    model = CoarseModel(config, torch.eye(VOCAB, dtype=torch.float32))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.7, generator=generator)
    return model


def _sample(policy: Any, samples: int, seed: int) -> GTest:
    model = ToyLanguage()
    prompt = Prompt(
        torch.tensor(_PROMPT, dtype=torch.int64).expand(samples, -1).contiguous(),
        torch.full((samples,), len(_PROMPT), dtype=torch.int64),
    )
    made = policy.sample(
        model, prompt, LENGTH, params=SamplingParams(), noise=Noise.from_seed(seed, samples)
    )
    return g_test(count_sequences(made.tokens, VOCAB), model.distribution())
