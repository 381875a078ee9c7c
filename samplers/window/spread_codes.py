"""Arithmetic sampling: rows of one seed draw evenly spread samples.

L. Vilnis et al., "Arithmetic Sampling: Parallel Diverse Decoding for Large Language Models", ICML
2023 (arXiv 2210.15458), section 4. A row has a code in 0..1. The tokens of a slot divide the
interval by their probabilities, in the order of their ids; the row takes the token whose part its
code lies in, and that part, stretched to 0..1, is divided at the next slot. A uniform code is an
exact sample; of N codes that divide 0..1 evenly, floor(N p) or ceil(N p) begin with a text of
probability p >= 1 / N.

The code after a slot is a function of the tokens so far and their distributions, so that a pass
gives the codes of all its slots: those before the first wrong draft are right, like the tokens.

Departures: once the text so far has a probability of 1 / N or less, at most one other row can share
it, and the code's remaining digits are noise that rounding would decide. From there on tokens are
drawn with the slots' frozen noise: given the text, the code is uniform in its part and independent
of that noise, so that the distribution stays exact.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.samplers.window.run import WindowRun


class SpreadCodes:
    def __init__(self, run: WindowRun) -> None:
        assert run.params.spread is not None
        self._n = run.params.spread
        self._first = run.steps.declare("first slot of codes")  # [B] int64
        self._after = run.steps.declare("codes")  # [B, W + 1, 2] float64

    def choose(self, run: WindowRun, scores: Tensor, tokens: Tensor) -> Tensor:
        """Tokens `[B, W]` by scores `[B, W, V]`; `tokens` are drawn with frozen noise."""
        state = self._begin(run)
        p = scores.double().softmax(-1)
        ends = p.cumsum(-1)  # right ends of the parts
        chosen = []
        states = [state]
        for w in range(tokens.shape[1]):
            code, width = state.unbind(-1)  # [B] each
            is_spread = width > 1 / self._n
            total = ends[:, w, -1]
            inside = ends[:, w] > (code * total)[:, None]
            token = torch.where(is_spread, inside.int().argmax(-1), tokens[:, w])
            mass = p[:, w].gather(-1, token[:, None])[:, 0]
            start = ends[:, w].gather(-1, token[:, None])[:, 0] - mass
            stretched = ((code * total - start) / mass).clamp(0, 1 - 2**-53)
            after = torch.stack([stretched, width * mass / total], -1)
            state = torch.where(is_spread[:, None], after, state)
            chosen.append(token)
            states.append(state)
        self._hold(run, torch.stack(states, 1))
        return torch.stack(chosen, 1)

    def _begin(self, run: WindowRun) -> Tensor:
        """Code and probability of the text so far, `[B, 2]` float64."""
        code = run.noise.codes(self._n)
        fresh = torch.stack([code, torch.ones_like(code)], -1)
        after = self._after.value
        if after is None:
            return fresh
        n_generated = run.rows.n_generated
        index = (n_generated - self._first.get()).clamp(0, after.shape[1] - 1)
        held = after.gather(1, index[:, None, None].expand(-1, 1, 2))[:, 0]
        return torch.where(n_generated[:, None] == 0, fresh, held)

    def _hold(self, run: WindowRun, states: Tensor) -> None:
        missing = run.chooser.widest + 1 - states.shape[1]  # a held tensor has one shape
        self._after.hold(pad(states, (0, 0, 0, missing)))
        self._first.hold(run.rows.n_generated.clone())
