"""A given image as draft: an edited image is mostly the image.

Aggressive decoding (T. Ge et al., 2022, arXiv 2205.10350) for tokens that stand in a grid: nothing
is realigned, and what a pass predicts behind a changed token is no better draft, as it has seen the
token as it was.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from mmaccel.checks import within
from mmaccel.samplers.drafting.contract import Drafter, Drafts, DraftSource, OpenRun
from mmaccel.samplers.drafting.memory.source_text import IDS, GivenIds, ids_on


@dataclass(frozen=True)
class SourceImage(DraftSource):
    """The token of the same slot in a given image.

    Args:
        tokens: of the image, in the order in which they are generated.

    Loses: on images that change as a whole, or are sampled with other noise.
    """

    tokens: tuple[int, ...] = within(MISSING, hint=IDS, fewest=1, repr=False)

    is_capturable = True
    keeps_predictions = False
    reads_last_scores = False

    def open(self, run: OpenRun) -> Drafter:
        return ImageDrafter(self, ids_on(self.tokens, run.prompt.tokens.device))


@dataclass(eq=False)
class ImageDrafter(Drafter):
    ids: GivenIds

    @property
    def weights(self) -> object:
        return self.ids

    def propose(self, run: OpenRun) -> Drafts:
        image = self.ids.tensor
        slots = run.rows.slots[:, :-1].clamp(max=len(image) - 1)
        return Drafts(image[slots].clamp(max=run.vocab_size - 1))
