"""Multi-token prediction: drafts of a layer that a model's checkpoint has beside the model.

F. Gloeckle et al., "Better & Faster Large Language Models via Multi-token Prediction", ICML 2024
(arXiv 2404.19737); DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2. The
layer reads the state f that the output matrix reads and the embedding e of the token that follows:

    x = W [norm(e); norm(f)],  f' = norm(block(x)),  logits = the model's output matrix of f'

Checkpoints name it `num_nextn_predict_layers` or `num_mtp_layers`; transformers opens it.

Departures: where there are several such layers, the first one drafts every token, each on the state
that it has made itself, as EAGLE heads do; drafts are a chain. Otherwise as `Eagle`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from mmaccel.catalog import open_mtp
from mmaccel.contracts import TokenModel
from mmaccel.samplers.drafting.heads.eagle import HeadSource
from mmaccel.samplers.drafting.states import LayerStates


@dataclass(frozen=True)
class MTP(HeadSource):
    """Drafts of the model's own layer for multi-token prediction, of checkpoints that have one
    (DeepSeek-V3, GLM-4.5, Mellum) and were opened with `from_pretrained`.

    Loses: in wide windows: the layer was trained to be right once; take 3 or 4. Layers without
    rotary positions and recurrent ones are refused. No published checkpoint was at hand.
    """

    needs_layers = True
    name = "mtp"

    def load_head(self, model: LayerStates) -> Any:
        window = cast(TokenModel, model)
        return open_mtp(window.model, window.vocab_size)
