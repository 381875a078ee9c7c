"""The nodes of mmaccel; they live in the package of that name, which must be installed."""

from mmaccel.comfy.exports import find_exports

globals().update(find_exports())
