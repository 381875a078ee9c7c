"""A next-scale transformer as a `Denoiser` whose blocks are scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass, Denoiser, Prompt
from mmaccel.model_parts import Around, LayerCounts, ReducedLayers, ScalePasses
from mmaccel.pipelines.hosts.causal_lm.compatibility import check_mode, find_device
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from mmaccel.pipelines.hosts.next_scale.cache import ScaleCache
from mmaccel.pipelines.hosts.next_scale.network import NextScaleTransformer, whole
from mmaccel.tokenizers_vq.multi_scale import ScaleSums

_OFFERED = frozenset({"eviction", "own attention", "prompt keys", "scales"})


class NextScaleModel(Denoiser, ScalePasses, ReducedLayers):
    """Tokens of K scales, of sums of the codes before; ids V.. of prompts are conditions, and the
    last of all stands for an open slot.

    `forward` computes all scales of whole rows and keeps nothing; `forward_scale` one scale over a
    cache.
    """

    any_rows = True
    kv_cache_reason = "a pass adds a whole scale to its cache, alike in all heads"
    lengths: tuple[int, ...]

    def __init__(self, network: NextScaleTransformer, quantizer: ScaleSums) -> None:
        self.model, self.quantizer = network, quantizer
        config = network.config
        self.vocab_size = config.n_codes
        self.lengths, self.grids = quantizer.lengths, network.grids
        self.mask_token = config.n_codes + config.n_conditions
        self.n_ids = self.mask_token + 1
        self._methods = LayerMethods()
        self._cache: ScaleCache | None = None

    def lack(self, word: str, part: Any = None) -> str:
        if word == "eviction" and part is not None and (part.accumulates or part.merges):
            return (
                "its entries go after every scale, and what they received or were is not added up"
            )
        return "" if word in _OFFERED else super().lack(word, part)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_cache": None}

    @property
    def device(self) -> torch.device:
        return find_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.head.weight.dtype

    def moved(self) -> None:
        self._cache = None

    def use_methods(self, methods: Any, branches: int = 1) -> None:
        self._methods = methods

    @property
    def layer_counts(self) -> LayerCounts:
        return LayerCounts() if self._cache is None else self._cache.counts

    def reserve(self, rows: int, positions: int) -> None:
        check_mode(self.model)
        self.quantizer = self.quantizer.at(self.device)
        self._cache = None

    def _add(self, total: Tensor, codes: Tensor, scale: int) -> Tensor:
        """The sum of scales `[b, C, N, N]` with one more, whose codes are `[b, n]`."""
        return total + self.quantizer.spread(codes, scale).to(total.dtype)

    def _sums(self, codes: Tensor) -> Tensor:
        """What the entries of all scales above 0 are made of, `[R, L - 1, C]`."""
        parts = codes.split(self.lengths, 1)
        total, sums = self.quantizer.nothing(len(codes), self.device), []
        for scale in range(1, len(parts)):
            total = self._add(total, parts[scale - 1], scale - 1)
            sums.append(self.quantizer.shrink(total, scale))
        return torch.cat(sums, 1)

    def tell(self, ids: Tensor, is_real: Tensor) -> tuple[Any, Tensor]:
        """What the network reads of prompt ids `[R, T]`, right-aligned, and which of the entries
        that it makes of them are real, `[R, T]` bool: here the ids, without needless padding.
        """
        width = int(is_real.sum(1).max())
        return ids[:, -width:], is_real[:, -width:]

    def forward(self, entries: CanvasPass) -> Tensor:
        """What stands in open slots has no effect on the logits of their scale."""
        tokens = entries.tokens
        n_text = tokens.shape[1] - sum(self.quantizer.lengths)
        ids = (tokens[:, :n_text] - self.vocab_size).clamp(0)
        codes = tokens[:, n_text:]
        codes = codes.where(codes < self.vocab_size, 0)
        sums = self._sums(codes).to(self.dtype)
        logits = self.model(*self.tell(ids, entries.reads[:, 0, :n_text]), sums)
        slots = entries.queries - n_text
        return logits.gather(1, slots[..., None].expand(-1, -1, logits.shape[-1]))

    def begin(self, prompt: Prompt) -> None:
        self._cache = None
        self._batch, self._branches = prompt.batch, prompt.branches
        self._total = self.quantizer.nothing(prompt.batch, self.device)
        self._read(prompt)

    def _read(self, prompt: Prompt) -> None:
        """Ids of the conditions, right-aligned `[R, T]`, and which of them are real."""
        width = prompt.tokens.shape[1]
        index = torch.arange(width, device=prompt.tokens.device)
        pad = (width - prompt.lengths)[:, None]
        ids = prompt.tokens.gather(1, (index - pad).clamp(min=0)) - self.vocab_size
        self._is_real = index >= pad
        self._ids = torch.where(self._is_real, ids, 0)

    def restart(self, rows: Tensor, prompt: Prompt) -> None:
        self._read(prompt)
        self._total[rows] = 0
        if self._cache is not None:
            self._cache.restart(self._pass_rows(rows))

    def _pass_rows(self, rows: Tensor) -> Tensor:
        """Rows `[G * b]` of the pass, of rows `[b]` asked for."""
        first = torch.arange(self._branches, device=rows.device)[:, None] * self._batch
        return (first + rows).flatten()

    def forward_scale(
        self, scale: int, before: Tensor | None, rows: Tensor | None, around: Around | None
    ) -> tuple[Tensor, int]:
        network = self.model
        asked = torch.arange(self._batch, device=self.device) if rows is None else rows
        at = self._pass_rows(asked)
        told, of_prompt = self.tell(self._ids[at], self._is_real[at])
        is_real = None
        if before is None:
            x = network.first_entries(told)
            is_real = None if bool(of_prompt.all()) else of_prompt
        else:
            self._total[asked] = self._add(self._total[asked], before, scale - 1)
            sums = self.quantizer.shrink(self._total[asked], scale).to(self.dtype)
            x = network.entries(sums, scale).repeat(self._branches, 1, 1)
        turn = network.turns_of(scale, told, of_prompt)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self._cache is None:
                width = max(self._ids.shape[1], of_prompt.shape[1])
                positions = width - 1 + sum(network.lengths)
                evictor = self._methods.evictor
                n_layers = network.config.depth
                self._cache = ScaleCache(k, n_layers, len(self._ids), positions, evictor)
            return self._cache.attend(layer, q, k, v, at, is_real, self.grids[scale])

        condition, of_head = network.condition(told)
        x = network.run(x, condition, turn, attend, whole if around is None else around)
        entries = x[:, -network.lengths[scale] :]
        return network.logits(entries, of_head), x.shape[1]
