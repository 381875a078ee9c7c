"""From the values of widgets to the arguments of the library, with the checks on the way."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch

from mmaccel.checks import show
from mmaccel.comfy.table import NodeResult, NodeSpec, Widget
from mmaccel.errors import MMAccelError, OptionError
from mmaccel.limits import MAX_DIGITS, MAX_LINE, MAX_VALUE
from mmaccel.samplers.noise import choose_one_seed, draw_new_seed

_TYPES: dict[str, tuple[type, str]] = {  # kind of widget -> type and its name; others are texts
    "int": (Integral, "an integer"),
    "float": (Real, "a number"),
    "bool": (bool, "true or false"),
}


def to_argument(widget: Widget, value: Any) -> Any:
    """A widget's value as the library takes it.

    Raises:
        OptionError: "ids" with something else than whole numbers, or a bad seed.
    """
    if widget.is_seed:
        return choose_one_seed(value, draw_new_seed)
    for shown, argument in widget.stands_for:
        if value == shown:
            return argument
    if widget.kind == "ids":
        return _read_ids(widget.name, value)
    if widget.kind == "path":
        return str(value).strip().strip("\"'").strip()  # as file managers copy it
    return float(value) if widget.kind == "float" and isinstance(value, int) else value


def to_arguments(spec: NodeSpec, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a node's widgets as the library takes them.

    Args:
        spec: the node.
        values: of its widgets; one that is missing, or None because a link fills it later, counts
            as its default.
    """
    given = {w: w.default if values.get(w.name) is None else values[w.name] for w in spec.widgets}
    return {widget.name: to_argument(widget, value) for widget, value in given.items()}


def fingerprint(spec: NodeSpec, values: Mapping[str, Any]) -> str:
    """A text that changes when equal inputs give another result, as with a seed that is drawn."""
    read = to_arguments(spec, values)
    own = "" if spec.fingerprint is None else spec.fingerprint(**read)
    return f"{own} {read['seed']}" if values.get("seed") == -1 else own


def read_old_names(
    spec: NodeSpec, values: Mapping[str, Any], graph: Mapping[str, Any], node: str
) -> dict[str, Any]:
    """The values of a node, with those that its graph has under an old name.

    ComfyUI hands over values under names that the node has, so others are looked up in the graph.

    Args:
        spec: the node.
        values: what ComfyUI hands over, of which links have any name.
        graph: the whole graph in the API format.
        node: the node's id in it, which has none while another node runs it.
    """
    saved = {**graph.get(node, {}).get("inputs", {}), **values}
    old = {w.name: saved[w.old_name] for w in spec.widgets if w.old_name in saved}
    return {**old, **values}


def refusal(spec: NodeSpec, values: Mapping[str, Any]) -> str | None:
    """Why a node cannot run with these values of its widgets; None if it can.

    The library checks first, because its messages say what to do; the bounds of the table follow.
    """
    try:
        for widget in spec.widgets:
            if values.get(widget.name) is not None:
                check_type(widget, values[widget.name])
        spec.check(**to_arguments(spec, values))
        for widget in spec.widgets:
            if values.get(widget.name) is not None:
                check_widget(widget, values[widget.name])
    except (MMAccelError, OSError) as error:  # OSError: a path that is too long
        return str(error)
    return None


def run_node(spec: NodeSpec, host: Any, values: Mapping[str, Any]) -> NodeResult:
    """Run a node with the values of its widgets and links.

    Raises:
        OptionError: a bad value that came over a link.
    """
    message = refusal(spec, values)  # values that come over a link were not checked before
    if message is not None:
        raise OptionError(message)
    links = {socket.name: values.get(socket.name) for socket in spec.sockets}
    # ComfyUI runs nodes in inference mode. A model loaded there could be used nowhere else, and
    # the command line, which gives the same images, does not run in it.
    with torch.inference_mode(False), torch.no_grad():
        return spec.run(host, **to_arguments(spec, values), **links)


def check_type(widget: Widget, value: Any) -> None:
    """Refuse a value of another type than the widget's; a workflow and a link may bring any.

    Raises:
        OptionError: such a value, or an integer or text beyond the limits.
    """
    wanted, expected = _TYPES.get(widget.kind, (str, "a text"))
    is_right = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    if is_right and isinstance(value, Integral):
        is_right, expected = abs(value) < 10**MAX_DIGITS, f"at most {MAX_DIGITS} digits"
    elif is_right and isinstance(value, str):
        most = MAX_LINE if widget.kind == "text" else MAX_VALUE
        is_right, expected = len(value) <= most, f"at most {most} characters"
    if not is_right:
        raise OptionError(
            f"{widget.name}: expected {expected}, received {show(value)}; "
            f"{show(widget.default)} is what a new node has"
        )


def check_widget(widget: Widget, value: Any) -> None:
    """Refuse a value outside the widget's choices or bounds.

    Raises:
        OptionError: such a value.
    """
    if widget.choices and not widget.is_open and value not in widget.choices:
        raise OptionError(
            f"{widget.name}: expected one of {', '.join(widget.choices)}, received {show(value)}; "
            "choose one of these"
        )
    if widget.kind not in ("int", "float"):
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    least, most = widget.least, widget.most
    assert least is not None and most is not None  # every number in the table has both
    if not (is_number and least <= value <= most):  # False for NaN
        raise OptionError(
            f"{widget.name}: expected a number in {_show(least)}..{_show(most)}, "
            f"received {show(value)}; {widget.default} is what a new node has"
        )


def _show(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _read_ids(name: str, text: Any) -> tuple[int, ...]:
    parts = str(text).replace(",", " ").split()
    if not all(part.isdecimal() and len(part) <= MAX_DIGITS for part in parts):
        raise OptionError(
            f"{name}: expected token ids such as 198, 13, received {show(text)}; separate them by "
            "commas or blanks"
        )
    return tuple(int(part) for part in parts)
