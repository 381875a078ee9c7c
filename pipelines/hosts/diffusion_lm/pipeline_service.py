"""What services of diffusion models share, which replace methods of a pipeline or a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from mmaccel.capabilities import Capable, Option, explain, refuse
from mmaccel.contracts import LAYER_METHODS, NOT_OF_CANVASES, OF_CACHED_CANVASES
from mmaccel.errors import BusyError
from mmaccel.pipelines.hosts.attach.layout_processor import check_layout
from mmaccel.pipelines.hosts.attach.service import Service
from mmaccel.pipelines.hosts.generate_call import count_to_end

if TYPE_CHECKING:
    from mmaccel.pipelines.hosts.attach.generate import AttachOptions


class PolicyService(Service, Capable):
    """Base of one object's services, with `seed`, `strict`, `layout`, `layer_methods`."""

    slot = "model"
    whole: ClassVar[str] = "every pass computes the whole canvas"
    """Why passes keep and leave out nothing."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        self.target = target
        self.n_ids: int | None = None  # of the model, which a layout must have too
        self.call: Any = None  # the one that runs
        self.open()

    def open(self) -> None:
        """Find the target's parts."""
        raise NotImplementedError

    def serve(self, policy: Any, options: AttachOptions) -> None:
        """Decode by a policy from the next call on."""
        self.policy = policy
        self.seed = options.seed
        self.strict = options.strict
        self.layout = options.layout
        self.layer_methods = options.layer_methods
        check_layout(self.layout, self.n_ids)
        asked = [] if self.seed is None else [Option("seed", frozenset({"seeds"}))]
        if self.layout is not None:
            asked.append(Option("layout", frozenset({"token layouts"})))
        refuse(explain(policy, self.layer_methods, options.engine, *asked, self))
        options.engine.check(self.target.device)

    @property
    def model(self) -> Any:
        return self.target

    def lack(self, word: str, part: Any = None) -> str:
        if word in LAYER_METHODS | OF_CACHED_CANVASES | {"hidden slots"}:
            return self.whole
        return NOT_OF_CANVASES.get(word, "")

    @contextmanager
    def running(self, call: Any) -> Iterator[None]:
        """Inside the block a call runs, and no other one."""
        if self.call is not None:
            raise BusyError(
                "pipeline: expected one call at a time, received one while another runs; make a "
                "second pipeline of the same components for it"
            )
        self.call = call
        try:
            yield
        finally:
            self.call = None


def callback_tensors(given: Mapping[str, Any], default: Sequence[str]) -> list[str]:
    """Names of the tensors that a pipeline call's step callback asks for."""
    names = given.get("callback_on_step_end_tensor_inputs")
    names = getattr(given.get("callback_on_step_end"), "tensor_inputs", names)
    return list(default if names is None else names)


def check_inputs(pipe: Any, given: Mapping[str, Any]) -> None:
    """Run a pipeline's own checks of a call's arguments; their ValueError reaches the caller."""
    names = inspect.signature(pipe.check_inputs).parameters
    pipe.check_inputs(**{name: given[name] for name in names})


def make_output(
    kind: Callable[..., Any],
    decoder: Any,
    sequences: Tensor,
    end: int | None,
    given: Mapping[str, Any],
) -> Any:
    """A pipeline's output of `kind`: sequences `[B, L]` int64, and texts up to their first ends."""
    texts = None
    if given["output_type"] == "text" and decoder is not None:
        lengths = count_to_end(sequences, -1 if end is None else end).tolist()
        rows = [row[:n] for row, n in zip(sequences, lengths)]
        texts = decoder.batch_decode(rows, skip_special_tokens=True)
    return kind(sequences=sequences, texts=texts) if given["return_dict"] else (sequences, texts)
