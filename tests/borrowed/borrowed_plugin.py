"""A pytest plugin that attaches a policy around every `generate` of somebody else's tests.

Loaded by `run.py` with `-p borrowed_plugin` in a pytest process whose folder is a checkout of
transformers. `GenerationMixin.generate` is replaced for that process: a call runs under
`Jacobi(window=8)`, the test goes on with what it returned, and an accelerated call is made once
more as a reference: a greedy call without a policy, a sampled call under `Autoregressive()` from
the same state of torch's generator. Each call and each test's result is one line of JSON in the
file that MMACCEL_BORROWED names. With MMACCEL_BORROWED_PLAIN=1 nothing is replaced.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import inspect
import json
import os
import random
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from borrowed_compare import Comparison
from transformers import GenerationMixin

import mmaccel
from mmaccel.pipelines.hosts.attach.patching import is_injected

POLICY = mmaccel.Jacobi(window=8)
# Arguments that a call changes; the reference gets a copy of their state before the call.
_CHANGED = ("cache", "past_key_values", "logits_processor", "stopping_criteria")
_MULTIMODAL = ("pixel", "image", "video", "audio", "input_features", "mm_")
_ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
# Tests of torch.compile take up to a minute each; tests/attach has its own. Tests of training
# generate at their end alone.
_LEFT_OUT = ("torch_compile_test", "torch_export_test", "is_training_test", "slow")

_generate: Callable[..., Any] = GenerationMixin.generate
_running = threading.local()
_test = ""


def _write(**record: Any) -> None:
    with Path(os.environ["MMACCEL_BORROWED"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _kind(model: Any, options: dict[str, Any], reasons: list[str]) -> str:
    """Which calls are counted together: text alone is what the policies are for."""
    given = {name for name, value in options.items() if value is not None}
    if getattr(model.config, "is_encoder_decoder", False):
        return "encoder-decoder"
    if "beam search" in reasons or (options.get("num_beams") or 1) > 1:
        return "beams"
    if "assisted decoding" in reasons or given.intersection(_ASSISTED):
        return "assisted"
    if any(word in name for name in given for word in _MULTIMODAL):
        return "multimodal"
    return "text"


def _copied(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: copy.deepcopy(value) if name in _CHANGED else value
        for name, value in options.items()
        if name != "streamer"
    }


def _run_reference(
    model: Any, args: tuple[Any, ...], options: dict[str, Any], samples: bool, state: Any
) -> tuple[Any, Exception | None]:
    """The same call without the policy: what it returned, or what it raised."""
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    own = mmaccel.attach(model, mmaccel.Autoregressive()) if samples else contextlib.nullcontext()
    try:
        with own:
            return model.generate(*args, **options), None
    except Exception as error:
        return None, error
    finally:
        torch.set_rng_state(after)


def _comparison(model: Any, made: Any, options: dict[str, Any]) -> Comparison:
    """Numbers to 1e-5; of a model in half precision to its own rounding."""
    tolerance, mask = max(1e-5, torch.finfo(model.dtype).eps), options.get("attention_mask")
    sequences = getattr(made, "sequences", made)
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:  # once a returned sequence
        mask = mask.repeat_interleave(sequences.shape[0] // mask.shape[0], 0)
        return Comparison(tolerance, mask)
    return Comparison(tolerance)


def _do_sample(model: Any, options: dict[str, Any]) -> bool:
    config = options.get("generation_config") or model.generation_config
    given = options.get("do_sample")
    return bool(config.do_sample if given is None else given)


@functools.wraps(_generate)
def _watched(model: Any, *args: Any, **options: Any) -> Any:
    is_inside = getattr(_running, "is_inside", False) or is_injected(model)
    if is_inside or type(model).generate is not _watched:  # a `generate` of the model's own
        return _generate(model, *args, **options)
    _running.is_inside = True
    try:
        return _compare(model, args, options)
    finally:
        _running.is_inside = False


def _compare(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Make the call under the policy, note how it went, and hand on its result or its error."""
    kept, state, samples = _copied(options), torch.get_rng_state(), _do_sample(model, options)
    made, failure = None, None
    with mmaccel.attach(model, POLICY) as run:
        try:
            made = model.generate(*args, **options)
        except Exception as error:
            failure = error
        history = run.history
    reasons = list(history[-1].fallbacks) if history else []
    outcome, difference = "fallback" if reasons else "accelerated", None
    if failure is not None:
        outcome = "raised"
        _, expected = _run_reference(model, args, kept, False, state)
        if type(expected) is not type(failure):
            difference = f"expected {expected!r}, raised {failure!r}"
    elif not reasons:
        reference, error = _run_reference(model, args, kept, samples, state)
        difference = (
            f"expected {error!r}"
            if error
            else _comparison(model, made, options).find(reference, made)
        )
    _write(
        call=_test, model=type(model).__name__, kind=_kind(model, options, reasons),
        samples=samples, outcome=outcome, reasons=reasons, difference=difference,
        options=sorted(name for name, value in options.items() if value is not None),
    )  # fmt: skip
    if failure is not None:
        raise failure
    return made


def pytest_configure() -> None:
    if importlib.util.find_spec("timeout_decorator") is None:  # OPT's tests of checkpoints use it
        stand_in: Any = types.ModuleType("timeout_decorator")
        stand_in.timeout = lambda seconds: lambda function: function
        sys.modules["timeout_decorator"] = stand_in
    if os.environ.get("MMACCEL_BORROWED_PLAIN") != "1":
        GenerationMixin.generate = _watched  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that generate: those marked so, and those whose source calls `generate`."""
    chosen = [item for item in items if _generates(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def _generates(item: pytest.Item) -> bool:
    if any(item.get_closest_marker(name) for name in _LEFT_OUT) or "compilation" in item.name:
        return False
    if item.get_closest_marker("generate"):
        return True
    function = getattr(item, "function", None)
    function = getattr(function, "place_as", function)  # what `parameterized` wrapped
    try:
        return ".generate(" in inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every run draws the same weights and prompts, whatever ran before."""
    global _test
    _test = item.nodeid
    torch.manual_seed(0)
    random.seed(0)
    for name, module in list(sys.modules.items()):
        own = getattr(module, "global_rng", None) if name.startswith("tests.") else None
        if isinstance(own, random.Random):
            own.seed(0)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:  # a file that cannot be imported
        _write(test=report.nodeid, result="failed", message=str(report.longrepr)[-400:])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.failed or (report.when == "setup" and report.skipped):
        message = str(getattr(report.longrepr, "reprcrash", report.longrepr) or "")
        _write(test=report.nodeid, result=report.outcome, seconds=report.duration,
               message=message[:400])  # fmt: skip
