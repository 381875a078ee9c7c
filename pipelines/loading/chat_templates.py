"""Chat templates of strangers, rendered in a process of their own.

A template is a program: transformers' sandbox keeps it from files and the network, and lets it loop
for ever or fill the memory. The operating system alone bounds both, so a child process renders and
its text comes back: forked, because it then has the processor, and uses neither torch nor a device.
Where no process can be forked (Windows), the template is rendered in place, within its length.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.loading.refusal import say_reason

MAX_TEMPLATE = 2**18  # characters; the longest published ones have 30 000
_MAX_TEXT = 2**22  # characters of all prompts of a call: four times the longest context
_MEMORY = 2**29  # bytes beyond those of this process
_SECONDS = 10.0  # a published template takes milliseconds
_READY = "{{ messages[0]['rendered'] }}"
Message = Mapping[str, Any]


def apply_chat_template(
    processor: Any, chats: Sequence[Sequence[Message]], given: Mapping[str, Any], **options: Any
) -> Any:
    """What the method of the same name gives, with its template under limits.

    Args:
        processor: or tokenizer, of transformers.
        chats: B conversations.
        given: options for the template: `add_generation_prompt` and others.
        options: for what is done with the texts.

    Raises:
        UnsupportedModelError: see `render_chats`.
    """
    texts = render_chats(processor, chats, **given)
    ready = [
        [{**chat[0], "rendered": text}, *chat[1:]] for chat, text in zip(chats, texts, strict=True)
    ]
    return processor.apply_chat_template(ready, chat_template=_READY, **options)


def render_chats(processor: Any, chats: Sequence[Sequence[Message]], **given: Any) -> list[str]:
    """The prompts of conversations.

    Args:
        processor: or tokenizer, of transformers.
        chats: B conversations.
        given: options for the template: `add_generation_prompt` and others.

    Raises:
        UnsupportedModelError: a template that is longer than `MAX_TEMPLATE`, that fails, or that
            takes too much time, memory or text.
    """
    own = getattr(processor, "chat_template", None)
    length = sum(map(len, own.values())) if isinstance(own, dict) else len(own or "")
    if length > MAX_TEMPLATE:
        raise _refusal(f"one of {length} characters, more than {MAX_TEMPLATE}")
    rendered: list[str] = _run_apart(
        lambda: processor.apply_chat_template(list(chats), tokenize=False, **given)
    )
    return rendered


def _refusal(received: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"chat template: expected one that renders a prompt, received {received}; copy the "
        "folder again, or set chat_template of its processor"
    )


def _run_apart(render: Callable[[], list[str]]) -> list[str]:
    """The texts that a function makes, in a child process with limits of time and memory."""
    if not hasattr(os, "fork"):
        made = _try(render)
    else:
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which stay behind
            child = os.fork()
        if child == 0:
            _render_and_exit(render, writer)
        os.close(writer)
        made = _read_answer(child, reader)
    if "error" in made:
        raise _refusal(made["error"])
    texts: list[str] = made["texts"]
    return texts


def _try(render: Callable[[], list[str]]) -> dict[str, Any]:
    """The texts, or why there are none."""
    try:
        texts = render()
    except MemoryError:
        return {"error": f"one that takes more than {_MEMORY // 2**20} MB"}
    except Exception as error:
        return {"error": f"one that fails ({say_reason(error)})"}
    if sum(map(len, texts)) > _MAX_TEXT:
        return {"error": f"one that writes more than {_MAX_TEXT} characters"}
    return {"texts": texts}


def _render_and_exit(render: Callable[[], list[str]], writer: int) -> None:
    """Write the texts to a pipe and end this process, which the kernel ends at the deadline."""
    try:
        gc.disable()  # the collector might free tensors of a device, which this process has not
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _SECONDS)
        _limit_memory()
        data = json.dumps(_try(render)).encode("ascii")
        with os.fdopen(writer, "wb") as opened:
            opened.write(data)
    finally:
        os._exit(0)


def _limit_memory() -> None:
    """Limit the address space, where the system says how large it is."""
    import resource

    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + _MEMORY
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))


def _read_answer(child: int, reader: int) -> dict[str, Any]:
    """What a child writes until it ends; the child is gone afterwards in any case."""
    try:
        with os.fdopen(reader, "rb") as opened:
            data = opened.read()
    except BaseException:  # Ctrl-C
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        with suppress(ChildProcessError):  # a program that ignores SIGCHLD
            os.waitpid(child, 0)
    if not data:
        return {"error": f"one that takes more than {_SECONDS:g} s or {_MEMORY // 2**20} MB"}
    made: dict[str, Any] = json.loads(data)
    return made
