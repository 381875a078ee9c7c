"""DFlash drafts: a small block-diffusion network fills a window in one pass.

See `mmaccel.samplers.drafting.parallel.dflash_model` for the paper, and the layouts of published
folders.

After a pass the network's layers read the large model's states of the window, as keys and values;
before the next one a block of masks attends to those of accepted tokens.

Departures: a window is at most a block, which is denoised as a whole; under guidance the network is
one row for all branches: it reads the guided states of passes, and those of the first branch of a
prompt.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import cast

import torch
from torch import Tensor

from mmaccel.checks import show, within
from mmaccel.contracts import Pass
from mmaccel.errors import OptionError
from mmaccel.kernels.truncation import guide
from mmaccel.samplers.drafting.contract import Drafter, Drafts, DraftSource, OpenRun, PassScores
from mmaccel.samplers.drafting.heads.eagle import check_states, find_file_time, open_once
from mmaccel.samplers.drafting.heads.eagle_model import HeadCache
from mmaccel.samplers.drafting.in_turn import draft_at_once
from mmaccel.samplers.drafting.parallel.dflash_model import DFlashModel, load_dflash
from mmaccel.samplers.drafting.states import LayerStates, PromptReader
from mmaccel.samplers.window.step_state import Held


@dataclass(frozen=True)
class DFlash(DraftSource):
    """A draft source: a DFlash network in a folder.

    Args:
        folder: holds `config.json` and `model.safetensors`.
    """

    folder: str = within(MISSING, hint="give the folder of a network")

    needs = frozenset({"layer states"})
    keeps_predictions = False
    reads_last_scores = False
    reads_scores = True

    def file_time(self) -> float:
        """When the weights were written."""
        return find_file_time(self.folder)

    def load_head(self, model: LayerStates) -> DFlashModel:
        """The network over a model; see `load_dflash`."""
        return load_dflash(
            self.folder,
            embedding=model.input_matrix(),
            output=model.output_matrix(),
            n_layers=model.n_layers,
        )

    def open(self, run: OpenRun) -> Drafter:
        """See `DraftSource.open`.

        Raises:
            OptionError: a model that hands out no hidden states, or a window wider than a block;
                see also `load_dflash`.
            UnsupportedModelError: see `load_dflash`.
        """
        model = check_states(run, self)
        network = open_once(self, model)
        window = run.policy.window
        size = network.config.block_size
        if not isinstance(window, int) or window > size:
            raise OptionError(
                f"window: expected at most {size}, the block of {self!r}, received "
                f"{show(window)}; set window={size}"
            )
        drafter = DFlashDrafter(
            self,
            network,
            keys=run.state.declare("keys of the network"),
            values=run.state.declare("values of the network"),
            first=run.state.declare("first column of the network"),
            seen=run.state.declare("states of the last pass"),
        )
        layers = tuple(n + 1 for n in network.config.target_layers)  # whose inputs these states are
        model.keep_states(True, layers, drafter.read_prompt(run))
        return drafter


@dataclass(eq=False)
class DFlashDrafter(Drafter):
    """Drafts of a network in one run. The state of the token at column c stands at column c.

    Args:
        network: the network.
        keys, values, first: see `HeadCache`.
        seen: `[B, W, F]`, states of the pass before tokens were accepted.
    """

    network: DFlashModel
    keys: Held
    values: Held
    first: Held
    seen: Held
    _begun: HeadCache | None = None  # behind the prompt, until the first step

    def read_prompt(self, run: OpenRun) -> PromptReader | None:
        """What reads the states of the prompt; None where rows join later, which begin without."""
        if run.scheduler is not None:
            return None

        def read(entries: Pass, states: Tensor) -> None:
            rows = run.prompt.batch
            first = run.buffer.origin - run.prompt.lengths[:rows]
            columns = entries.indices[:rows] + first[:, None]
            self._begun = self._cache(run)._replace(first=first)
            self._read(run, states[:rows], columns, self._begun)

        return read

    def propose(self, run: OpenRun) -> Drafts:
        buffer = run.buffer
        if run.width == 1:
            return Drafts(buffer.slots[:, :0])
        columns = (buffer.columns[:, 0] - 1).clamp(min=0)  # of the last known token, [B]
        last = buffer.tokens.gather(1, columns[:, None])[:, 0].clamp(0, run.vocab_size - 1)
        logits = self.network(last, columns, self._cache(run))[:, : run.width - 1]
        run.stats.draft_passes += 1
        # all branches of a guided run say the same
        return draft_at_once(run, logits.repeat(run.prompt.branches, 1, 1))

    def observe(self, run: OpenRun, scores: PassScores, noise: Tensor | None) -> None:
        states = cast(LayerStates, run.model).last_states
        assert states is not None
        self.seen.hold(guide(states.float(), run.prompt.branches, run.params.guidance_scale))

    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        cache = self._cache(run)
        # those behind what was accepted are written again before an entry attends to them
        self._read(run, self.seen.get(), (run.buffer.columns - 1).clamp(min=0), cache)
        self.keys.hold(cache.keys)
        self.values.hold(cache.values)
        self.first.hold(cache.first)
        self._begun = None

    def begin_rows(self, run: OpenRun, batch_slots: Tensor) -> None:
        if self.first.value is not None:
            self.first.get()[batch_slots] = run.buffer.origin - 1

    def close(self, run: OpenRun) -> None:
        cast(LayerStates, run.model).keep_states(False)

    def _read(self, run: OpenRun, states: Tensor, columns: Tensor, cache: HeadCache) -> None:
        last = run.buffer.tokens.shape[1] - 1
        self.network.read(states, columns.clamp(max=last), cache)

    def _cache(self, run: OpenRun) -> HeadCache:
        """The context; of a row of which nothing has been read, the last token of the prompt comes
        first.
        """
        if self.keys.value is not None:
            return HeadCache(self.keys.get(), self.values.get(), self.first.get())
        if self._begun is not None:
            return self._begun
        cache = self.network.empty_cache(run.prompt.batch, run.buffer.tokens.shape[1])
        first = torch.full_like(cache.first, run.buffer.origin - 1)
        return cache._replace(first=first)
