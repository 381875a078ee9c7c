"""DFlash drafts: a small block-diffusion network fills a window in one pass.

J. Chen et al., arXiv 2602.06036 (more in `dflash_model.py`). After a pass the network's layers read
the large model's states of the window, as keys and values; before the next one a block of masks
attends to those of accepted tokens.

Departures: a window is at most a block, which is denoised as a whole; under guidance the network is
one row for all branches: it reads the guided states of passes, and those of the first branch of a
prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.checks import show
from mmaccel.errors import OptionError
from mmaccel.samplers.drafting.contract import Drafts, OpenRun
from mmaccel.samplers.drafting.heads.eagle import FolderHead, HeadDrafter, declare_cache
from mmaccel.samplers.drafting.heads.eagle_model import HeadCache
from mmaccel.samplers.drafting.in_turn import draft_at_once
from mmaccel.samplers.drafting.parallel.dflash_model import DFlashModel, load_dflash
from mmaccel.samplers.drafting.states import LayerStates


@dataclass(frozen=True)
class DFlash(FolderHead):
    """A DFlash network in a folder: a few layers over the large model's states, which draft a
    window in one pass.

    Args:
        folder: holds `config.json` and `model.safetensors`, of transformers'
            `MuseGlimmerAssistantModel` or the authors' `DFlashDraftModel`.

    Loses: as `Pard`; wider windows than its `block_size` and DFlash 2 are refused. No published
    network was at hand.
    """

    def load_head(self, model: LayerStates) -> DFlashModel:
        return load_dflash(
            self.folder,
            embedding=model.input_matrix(),
            output=model.output_matrix(),
            n_layers=model.n_layers,
        )

    def begin(self, run: OpenRun, head: DFlashModel) -> HeadDrafter:
        window = run.policy.window
        size = head.config.block_size
        if not isinstance(window, int) or window > size:
            raise OptionError(
                f"window: expected at most {size}, the block of {self!r}, received "
                f"{show(window)}; set window={size}"
            )
        return DFlashDrafter(self, head, **declare_cache(run))


@dataclass(eq=False)
class DFlashDrafter(HeadDrafter):
    """Drafts of a network. The state of the token at column c stands at column c."""

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(n + 1 for n in self.head.config.target_layers)  # behind which states are read

    def propose(self, run: OpenRun) -> Drafts:
        rows = run.rows
        if run.width == 1:
            return Drafts(rows.slots[:, :0])
        columns = (rows.columns[:, 0] - 1).clamp(min=0)  # of the last known token, [B]
        last = rows.tokens.gather(1, columns[:, None])[:, 0].clamp(0, run.vocab_size - 1)
        logits = self.head(last, columns, self._cache(run))[:, : run.width - 1]
        run.stats.draft_passes += 1
        # all branches of a guided run say the same
        return draft_at_once(run, logits.repeat(run.prompt.branches, 1, 1))

    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        self.accept(run, self._cache(run))

    def read(self, run: OpenRun, states: Tensor, columns: Tensor, cache: HeadCache) -> None:
        last = run.rows.tokens.shape[1] - 1
        self.head.read(states, columns.clamp(max=last), cache)
