"""What a node is, independent of ComfyUI's schemas: inputs, outputs, its function and its check.

`nodes.py` lists the nodes; `schemas.py` turns the list into ComfyUI's classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

PREFIX = "MMAccel"
MODEL, POLICY, STATS = "MMACCEL_MODEL", "MMACCEL_POLICY", "MMACCEL_STATS"
SPEAKER, ANIMATOR = "MMACCEL_SPEECH_MODEL", "MMACCEL_VIDEO_MODEL"
TEXT_TO_VIDEO = "MMACCEL_TEXT_TO_VIDEO_MODEL"
VISION, VISUAL_TOKENS = "MMACCEL_VISION_MODEL", "MMACCEL_VISUAL_TOKENS"
KV_CACHE = "MMACCEL_KV_CACHE"
IMAGE, VIDEO, AUDIO, TEXT = "IMAGE", "VIDEO", "AUDIO", "STRING"

Kind = Literal["int", "float", "bool", "choice", "text", "path", "ids"]


@dataclass(frozen=True)
class Widget:
    """A value that is chosen in the node.

    Attributes:
        name: of the input, and of the argument that takes it.
        kind: "ids" is a text of whole numbers, "path" one that names a file or a model.
        default: what a new node shows.
        tooltip: one or two sentences.
        least, most, step: of a number.
        choices: of a choice.
        stands_for: values that mean something a widget cannot hold, such as 0 for None.
        is_multiline: of a text.
        is_seed: whether the page offers to change it after every run.
        is_optional: whether a graph may leave it out, which counts as the default.
        is_advanced: whether a page that can hides it until it is asked for.
        is_open: of a choice: whether the node's check takes more than the choices.
        old_name: its name in graphs that were saved before it was renamed.
    """

    name: str
    kind: Kind
    default: Any
    tooltip: str
    least: float | None = None
    most: float | None = None
    step: float | None = None
    choices: tuple[str, ...] = ()
    stands_for: tuple[tuple[Any, Any], ...] = ()
    is_multiline: bool = False
    is_seed: bool = False
    is_optional: bool = False
    is_advanced: bool = False
    is_open: bool = False
    old_name: str = ""


@dataclass(frozen=True)
class Socket:
    """An input that another node fills."""

    name: str
    kind: str
    tooltip: str
    is_optional: bool = False


@dataclass(frozen=True)
class Output:
    """An output of a node."""

    name: str
    kind: str
    tooltip: str


@dataclass(frozen=True)
class NodeResult:
    """What a node returns.

    Attributes:
        values: its outputs in order.
        text: for the page.
        graph: nodes that are to run now, in the API format; `values` are links to their outputs.
    """

    values: tuple[Any, ...]
    text: str | None = None
    graph: Mapping[str, Any] | None = None


class Host(Protocol):
    """The program that a node runs in."""

    def check_interrupt(self) -> None:
        """Raise the host's own exception if the user wants this run to end."""

    def report(self, done: int, total: int, image: Image | None) -> None:
        """Show progress, and a preview."""

    def video(self, frames: Tensor, fps: float) -> Any:
        """The host's own video of frames `[F, height, width, 3]`, float in 0..1."""

    def device(self) -> str:
        """Where the host computes, as torch names it."""

    def graph(self) -> Any:
        """An empty `GraphBuilder` of ComfyUI, for a node that runs other nodes."""

    def free_memory(self, size: int, device: str) -> None:
        """Let the host free `size` bytes on a device."""


@dataclass(frozen=True)
class NodeSpec:
    """A node.

    Attributes:
        id: its name in saved workflows, which never changes; begins with `PREFIX`.
        title: its name on the page.
        summary: what it does.
        inputs, outputs: in the order of the page.
        run: `run(host, **inputs)`, with the widgets' values as the library takes them.
        check: `check(**widgets)`, with the same; raises `OptionError` before anything runs.
        fingerprint: `fingerprint(**widgets)`, a text that changes when equal inputs give another
            result.
        is_output: whether it runs although no other node uses its outputs.
        is_graph: whether it runs other nodes, see `NodeResult.graph`.
        folder: where the page lists it, below the pack's own.
    """

    id: str
    title: str
    summary: str
    inputs: tuple[Widget | Socket, ...]
    outputs: tuple[Output, ...]
    run: Callable[..., NodeResult]
    check: Callable[..., None]
    fingerprint: Callable[..., str] | None = None
    is_output: bool = False
    is_graph: bool = False
    folder: str = ""

    @property
    def widgets(self) -> tuple[Widget, ...]:
        """Its inputs that are values."""
        return tuple(entry for entry in self.inputs if isinstance(entry, Widget))

    @property
    def sockets(self) -> tuple[Socket, ...]:
        """Its inputs that are links."""
        return tuple(entry for entry in self.inputs if isinstance(entry, Socket))

    @property
    def has_old_names(self) -> bool:
        """Whether one of its widgets was renamed."""
        return any(widget.old_name for widget in self.widgets)

    @property
    def category(self) -> str:
        """Where the page lists it."""
        return f"mmaccel/{self.folder}".rstrip("/")

    def defaults(self) -> Mapping[str, Any]:
        """What a new node's widgets show."""
        return {widget.name: widget.default for widget in self.widgets}
