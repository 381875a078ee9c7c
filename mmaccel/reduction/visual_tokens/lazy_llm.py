"""LazyLLM: Q. Fu et al. (arXiv:2407.14057), section 3.2: at several layers the tokens with the
least attention of the one that predicts are left out of this step's later layers. Their states
there are held in an auxiliary cache, from which a later step goes on.

Departures: of a prompt with images, visual tokens alone are dropped; of a text, all words but the
first and the newest. What was generated stays. Every step chooses anew among *all* tokens. Layers
and counts are PyramidDrop's, where the paper tunes percentiles by task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mmaccel.reduction.visual_tokens.contract import PromptReducer
from mmaccel.reduction.visual_tokens.pyramid_drop import PyramidDrop


@dataclass(frozen=True)
class LazyLLM(PromptReducer, PyramidDrop):
    """Drops tokens of a prompt for the present step alone; a step that wants one computes it in the
    later layers. `keep` is what the last layers see. Of images (`visual_tokens=`) or words
    (`prompt_tokens=`).

    Args:
        layers: those that receive fewer tokens than the one before; None: at a quarter, half and
            three quarters of the depth.

    Loses: in long answers: each step wants other tokens; no memory is saved; trees, drafts of the
    model itself and heads are refused.
    Figures: SmolLM2-135M, prompts of 1500 words: the first token computes 74 % of the prompt's
    layers at 0.5 and 58 at 0.25, the answer 89 to 95 and 74 to 85; 5 and 3 of 5 answers stay;
    `scenes-vqa`, 22 % kept: nothing lost of 97.0.
    """

    revives: ClassVar[bool] = True
