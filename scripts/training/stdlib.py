"""`stdlib`, a small `LlamaForCausalLM` of Python source: its words, its data, its training.

Byte pairs are found on the training modules (R. Sennrich et al., "Neural Machine Translation of
Rare Words with Subword Units", ACL 2016, on bytes). A batch holds pieces of the modules, each of
which begins with `BOS` where it is the beginning of one; pieces are drawn at random, and the same
step draws the same ones. They are short at first, and as long as the positions in the last steps.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmaccel.demo.stdlib.modules import Module, read_modules

WIDTH, DEPTH, HEADS, KEY_HEADS, HEAD_WIDTH, INNER = 192, 6, 3, 1, 64, 512
WORDS = 2048
BOS, EOS, PAD = 0, 1, 2
SPECIAL = ("<s>", "</s>", "<pad>")
LONGEST = 2048  # positions
_SEED = 41


def make_tokenizer(texts: list[str]) -> Any:
    """A tokenizer of `WORDS` byte pairs, `BOS` before every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        padding_side="left",
        model_max_length=LONGEST,
    )


def prepare(work: Path) -> None:
    """Write the tokenizer and the tokens of both parts into a work folder, where missing."""
    if (work / "tokens.npz").is_file():
        return
    work.mkdir(parents=True, exist_ok=True)
    modules = read_modules()
    training = [module for module in modules if not module.is_held_out]
    held_out = [module for module in modules if module.is_held_out]
    tokenizer = make_tokenizer([module.text for module in training])
    tokenizer.save_pretrained(work / "tokenizer")
    facts = {"training": _facts(training), "held_out": _facts(held_out)}
    (work / "data.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    parts: dict[str, Any] = {
        name: np.concatenate([_encode(tokenizer, module) for module in part])
        for name, part in (("training", training), ("held_out", held_out))
    }
    partial = work / "tokens.partial.npz"
    np.savez(partial, **parts)
    partial.replace(work / "tokens.npz")


def _facts(modules: list[Module]) -> dict[str, Any]:
    n_bytes = sum(len(module.text.encode()) for module in modules)
    return {"modules": [module.name for module in modules], "bytes": n_bytes}


def _encode(tokenizer: Any, module: Module) -> Any:
    return np.array([*tokenizer(module.text, verbose=False)["input_ids"], EOS], dtype=np.uint16)


def build_model() -> Any:
    """A new model with random weights, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=DEPTH,
            num_attention_heads=HEADS,
            num_key_value_heads=KEY_HEADS,
            head_dim=HEAD_WIDTH,
            max_position_embeddings=LONGEST,
            tie_word_embeddings=True,
            initializer_range=0.02,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    )


class Stdlib:
    """See `scripts.training.generator.Task`.

    Args:
        work: folder that `prepare` filled.
        length: tokens of a piece.
        checks: pieces of held-out modules for the validation.
    """

    def __init__(self, work: Path, length: int, checks: int = 48) -> None:
        tokens = np.load(work / "tokens.npz")
        facts = json.loads((work / "data.json").read_text(encoding="utf-8"))
        self.training = tokens["training"].astype(np.int64)
        held_out = tokens["held_out"].astype(np.int64)
        self.bytes_a_token = facts["held_out"]["bytes"] / len(held_out)
        self.length = length
        n = len(held_out) // length
        chosen = np.linspace(0, n - 1, min(checks, n)).astype(int)
        pieces = held_out[: n * length].reshape(n, length)[chosen]
        self.checks = torch.from_numpy(pieces)
        self.options: dict[str, Any] = {"length": length, "tokens": len(self.training)}

    def build(self, start: str | None) -> Any:
        """See `Task`; `start` is the folder of a trained model."""
        if start is None:
            return build_model()
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Ids `[size, length]` twice; the model shifts the labels."""
        rng = np.random.default_rng((_SEED, step))
        first = rng.integers(len(self.training) - self.length, size=size)
        ids = torch.from_numpy(self.training[first[:, None] + np.arange(self.length)])
        return ids, ids

    def distinct(self, steps: int, size: int) -> int:
        """See `Task`."""
        return min(steps * size, len(self.training) // self.length)

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        """See `Task`."""
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    @torch.no_grad()
    def validate(self, model: Any, device: str) -> dict[str, float]:
        """Nats a token, and bits a byte, of pieces of held-out modules."""
        model.eval()
        losses = [self.loss(model, ids.to(device), ids, 0) for ids in self.checks.split(8)]
        model.train()
        nats = float(torch.stack(losses).mean())
        return {"validation": nats, "bits_a_byte": nats / math.log(2) / self.bytes_a_token}
