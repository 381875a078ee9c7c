"""An oracle that keeps entries at places, and knows of the canvas what an entry looks at alone."""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass
from mmaccel.evaluation.exactness.reference_models import OracleDenoiser


class StoreOracle(OracleDenoiser):
    """`OracleDenoiser` behind a prompt of `n_prompt` tokens, with a store.

    An entry's logits are the joint law's conditional, given the tokens at the places it reads; two
    tokens for one position are an error, and so is a place that nobody wrote.
    """

    has_store = True

    def __init__(self, joint: Tensor, n_prompt: int = 1) -> None:
        super().__init__(joint)
        self.n_prompt = n_prompt
        self.told: list[Tensor] = []  # per pass [R, Q, L], what each query saw; mask where nothing

    def reserve(self, rows: int, places: int) -> None:
        self.kept = torch.full((rows, places, 2), -1)

    def forward(self, entries: CanvasPass) -> Tensor:
        self.passes += 1
        assert self.passes <= 50, "a run that does not end"
        rows, count = entries.tokens.shape
        fresh = torch.stack([entries.tokens, entries.positions], -1)
        kept = self.kept[:rows]
        kept.scatter_(1, entries.places[..., None].expand(-1, -1, 2), fresh)
        if entries.reads.shape[2] > self.n_prompt + self.length:
            assert not entries.reads[..., -1].any()  # nobody's place
        reads = entries.reads.expand(-1, count, -1)
        reads = reads.gather(1, entries.queries[..., None].expand(-1, -1, reads.shape[2]))
        seen = torch.full((*entries.queries.shape, self.length), self.mask_token)
        for row, query, place in reads.nonzero().tolist():
            token, position = kept[row, place].tolist()
            assert position >= 0
            slot = position - self.n_prompt
            if slot >= 0 and token != self.mask_token:
                assert seen[row, query, slot] == self.mask_token
                seen[row, query, slot] = token
        self.told.append(seen)
        agrees = (seen[..., None, :] == self.table) | (seen[..., None, :] == self.mask_token)
        weight = agrees.all(-1) * self.joint.flatten()  # [R, Q, V ** L]
        is_token = torch.nn.functional.one_hot(self.table, self.vocab_size).double()
        slots = entries.positions.gather(1, entries.queries) - self.n_prompt
        mass = torch.einsum("rqk,klv->rqlv", weight, is_token)
        index = slots.clamp(0, self.length - 1)[..., None, None]
        return mass.gather(2, index.expand(-1, -1, 1, self.vocab_size))[:, :, 0].log()
