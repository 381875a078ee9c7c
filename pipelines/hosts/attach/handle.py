"""What `attach` hands back: statistics, and the way to the model as it was."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from mmaccel.errors import AttachError
from mmaccel.pipelines.hosts.attach.patching import Injection
from mmaccel.pipelines.hosts.attach.service import Service
from mmaccel.pipelines.hosts.vision_language.kept import KeptTokens
from mmaccel.results import Stats


class Handle:
    """An attached policy, held by its model, which leaving `with`, or `detach()`, restores."""

    def __init__(self, target: Any, service: Service) -> None:
        self._target = target
        self._service = service
        self._injection = Injection(self)
        try:
            for part, methods in service.methods():
                self._injection.add(part, methods)
        except Exception:
            self._injection.remove()
            raise

    @property
    def stats(self) -> Stats | None:
        """Statistics of the last finished call; None before the first."""
        return self._service.stats

    @property
    def history(self) -> list[Stats]:
        """Statistics of all finished calls, the last one at the end."""
        return self._service.history

    @property
    def kept_tokens(self) -> list[KeptTokens]:
        """The visual tokens that the last call kept, by image and video; empty without
        `visual_tokens` or images, and where the original loop ran.
        """
        return self._service.kept_tokens()

    def reset(self) -> None:
        """Drop all CUDA graphs, their buffers and the fused decoder; the next calls make them anew.

        Call it after a change of the model that moves no parameter: an attribute, a hook, an
        adapter switched on or off. Waits for calls of other threads; inside a call it raises
        BusyError.
        """
        with self._injection.calls.change("reset"):
            self._service.reset()

    def detach(self, *, keep_packed: bool = False) -> None:
        """Restore the model's own methods and the storage of its parameters; drop CUDA graphs.

        Waits for calls of other threads; inside a call it raises BusyError. AttachError where other
        code changed the model's class since.

        Args:
            keep_packed: whether parameters stay views of packed tensors, for the next policy.
        """
        with self._injection.calls.change("detach"):
            self._service.close(keep_packed=keep_packed)
            self._injection.remove()

    def __enter__(self) -> Handle:
        if not self._injection.is_active:
            raise AttachError(
                "handle: expected an attached policy, received one that was detached; "
                "call mmaccel.attach again"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def __repr__(self) -> str:
        name = type(self._target).__name__
        policy = vars(self._service)["policy"]
        calls = len(self.history)
        return f"Handle({name}, {policy!r}, {calls} calls)"
