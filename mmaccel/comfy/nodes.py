"""The nodes. Another one is an entry here."""

from __future__ import annotations

from mmaccel.catalog import POLICIES
from mmaccel.comfy.compare import COMPARE
from mmaccel.comfy.generate import GENERATE
from mmaccel.comfy.open_model import LOAD
from mmaccel.comfy.policies import policy_node
from mmaccel.comfy.record import SHOW
from mmaccel.comfy.speech import LOAD_SPEAKER, SPEAK
from mmaccel.comfy.table import NodeSpec
from mmaccel.comfy.video import ANIMATE, LOAD_ANIMATOR

NODES: dict[str, NodeSpec] = {
    spec.id: spec
    for spec in (
        LOAD,
        GENERATE,
        COMPARE,
        LOAD_SPEAKER,
        SPEAK,
        LOAD_ANIMATOR,
        ANIMATE,
        SHOW,
        *map(policy_node, POLICIES),
    )
}
