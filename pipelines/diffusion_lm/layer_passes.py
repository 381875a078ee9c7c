"""Passes of models that make masks or positions themselves, over the stores of their layers.

LLaDA's layer joins its keys with those before and turns all of them by their order, so that an
entry in the middle of a canvas cannot be computed alone; copies from before padding was served also
drop the mask. So during a pass over the cache the layers' `attention` is the function here: it
turns by the positions of the pass, and writes and reads the stores as a decoder of transformers
does. Fast-dLLM v2 makes a mask of blocks in the order of its input, in `eval_mask` of its decoder,
and hands it to every layer: during a pass that method returns the mask of the pass.

Sources: `LLaDABlock.attention` in the checkpoints' code, which MMaDA and Lumina-DiMOO have too;
`Fast_dLLM_QwenModel.forward` in `modeling.py` of Fast-dLLM v2's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident
from typing import Any, TypeAlias

from torch import Tensor

from mmaccel.contracts import CanvasPass
from mmaccel.errors import UnsupportedModelError
from mmaccel.kernels.grouped_attention import grouped_attention
from mmaccel.pipelines.diffusion_lm.cached_passes import CachedPasses
from mmaccel.pipelines.diffusion_lm.selected_logits import queried_logits

Answers: TypeAlias = list[tuple[int, Callable[..., Any]]]
"""Of one method of a module: threads, and what answers their calls."""
# by id of the module and name; and what the module itself had there
_answers: dict[tuple[int, str], tuple[Answers, Any]] = {}
_changing = Lock()


@contextmanager
def answering(modules: Sequence[Any], name: str, answer: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, calls of a method of modules by this thread are `answer(module, ...)`;
    other threads, whose blocks may begin or end inside this one, get their own.
    """
    entry = get_ident(), answer
    with _changing:
        for module in modules:
            answers, _ = _answers.setdefault((id(module), name), ([], vars(module).get(name)))
            if not answers:
                setattr(module, name, partial(_call, module, getattr(module, name), answers))
            answers.append(entry)
    try:
        yield
    finally:
        with _changing:
            for module in modules:
                answers, before = _answers[id(module), name]
                answers.remove(entry)
                if answers:
                    continue
                del _answers[id(module), name]
                vars(module).pop(name, None)
                if before is not None:
                    setattr(module, name, before)


def _call(module: Any, own: Any, answers: Answers, *args: Any, **options: Any) -> Any:
    for thread, answer in reversed(tuple(answers)):
        if thread == get_ident():
            return answer(module, *args, **options)
    return own(*args, **options)


class LLaDAPasses(CachedPasses):
    """See `CachedPasses`.

    Args:
        model: takes `input_ids`, in passes without a cache with an `attention_bias`. Without layers
            of this code it has these alone.
        takes_bias: False where such a pass is over every column (Lumina-DiMOO).
        options, plain_options: see `CachedPasses`.
    """

    def __init__(self, model: Any, *, takes_bias: bool = True, **options: Any) -> None:
        self._takes_bias = takes_bias
        transformer = getattr(getattr(model, "model", None), "transformer", None)
        self._blocks: list[Any] = [*getattr(transformer, "blocks", ())]
        super().__init__(model, n_layers=len(self._blocks), form="bool", **options)

    def _call(
        self, entries: CanvasPass, mask: Tensor, cache: Any, options: Mapping[str, Any]
    ) -> Tensor:
        run = partial(queried_logits, self.model, entries.queries, input_ids=entries.tokens)
        if cache is None and self._takes_bias:
            return run(attention_bias=mask.expand(-1, 1, entries.tokens.shape[1], -1), **options)
        if cache is None and not bool(mask.all()):
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: expected rows of one length, as its passes without "
                "a cache are over every column, received padding; decode these prompts one by one"
            )
        if cache is None:
            return run(**options)
        rotary = self._blocks[0].rotary_emb  # all layers have the same
        tables = rotary.get_rotary_embedding(int(entries.positions.max()) + 1, mask.device)
        sin, cos = (table[0, 0][entries.positions][:, None] for table in tables)  # [R, 1, W, D]

        def turn(states: Tensor) -> Tensor:
            """Queries or keys `[R, H, W, D]`, turned to their positions."""
            wide = states.float() if rotary.config.rope_full_precision else states
            own = sin.to(states.device), cos.to(states.device)
            turned: Tensor = rotary.apply_rotary_pos_emb(*own, wide)
            return turned.type_as(states)

        def attend(
            block: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **others: Any
        ) -> tuple[Tensor, None]:
            """As a layer's own attention of `[R, W, C]`, over its store."""
            if block.q_norm is not None:
                q, k = block.q_norm(q).to(k.dtype), block.k_norm(k).to(k.dtype)
            n_heads = block.config.n_heads, *[block.config.effective_n_kv_heads] * 2
            query, key, value = (
                states.unflatten(2, (n, -1)).transpose(1, 2)
                for states, n in zip((q, k, v), n_heads, strict=True)
            )
            key, value = cache.layers[block.layer_id].update(turn(key), value)
            out = grouped_attention(turn(query), key, value, mask.to(key.device))
            return block.attn_out(out.transpose(1, 2).flatten(2)), None

        with answering(self._blocks, "attention", attend):
            return run(**options)


class FastDLLMPasses(CachedPasses):
    """See `CachedPasses`."""

    def _call(
        self, entries: CanvasPass, mask: Tensor, cache: Any, options: Mapping[str, Any]
    ) -> Tensor:
        decoder = getattr(self.model, "model", self.model)
        with answering([decoder], "eval_mask", lambda *_, **given: mask):
            return super()._call(entries, mask, cache, options)
