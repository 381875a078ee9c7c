"""The table of nodes: a new node is one more entry here."""

from __future__ import annotations

from mmaccel.catalog import POLICIES
from mmaccel.comfy.images import COMPARE, GENERATE
from mmaccel.comfy.load_model import LOAD
from mmaccel.comfy.policies import policy_node
from mmaccel.comfy.speech import LOAD_SPEAKER, SPEAK
from mmaccel.comfy.stats import SHOW
from mmaccel.comfy.table import NodeSpec
from mmaccel.comfy.video import ANIMATE, LOAD_ANIMATOR

_OTHERS = (LOAD, GENERATE, COMPARE, LOAD_SPEAKER, SPEAK, LOAD_ANIMATOR, ANIMATE, SHOW)
NODES: dict[str, NodeSpec] = {
    spec.id: spec for spec in (*_OTHERS, *(policy_node(name) for name in POLICIES))
}
