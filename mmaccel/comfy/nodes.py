"""The table of nodes: a new node is one more entry here."""

from __future__ import annotations

from mmaccel.catalog import POLICIES
from mmaccel.comfy.images import COMPARE, GENERATE
from mmaccel.comfy.load_model import LOAD
from mmaccel.comfy.policies import policy_node
from mmaccel.comfy.speech import LOAD_SPEAKER, SPEAK
from mmaccel.comfy.stats import SHOW
from mmaccel.comfy.table import NodeSpec
from mmaccel.comfy.text_to_image import TEXT_TO_IMAGE
from mmaccel.comfy.video import ANIMATE, LOAD_ANIMATOR
from mmaccel.comfy.vision import ANSWER, LOAD_VISION, REDUCE

_SOUND_AND_VIDEO = (LOAD_SPEAKER, SPEAK, LOAD_ANIMATOR, ANIMATE)
_VISION = (LOAD_VISION, REDUCE, ANSWER)
_OTHERS = (TEXT_TO_IMAGE, LOAD, GENERATE, COMPARE, *_SOUND_AND_VIDEO, *_VISION, SHOW)
NODES: dict[str, NodeSpec] = {
    spec.id: spec for spec in (*_OTHERS, *(policy_node(name) for name in POLICIES))
}
