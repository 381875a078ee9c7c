"""Tiny checkpoints on disk, random weights, written by the libraries' own `save_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmaccel.pipelines.llamagen import LlamaGenConfig, LlamaGenTransformer
from mmaccel.tokenizers_vq.vqgan import VQGAN, VQGANConfig
from tests.beds import build_bed, build_janus

WORDS = ["a", "red", "fox", "in", "the", "snow", "blue", "cat", "on", "grass"]
NUMBERS = ["3", "4", "*"]  # Emu3 writes the grid's size into its prompt
CAPTIONS = ["a red fox in the snow", "blue cat", "the grass"]
TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
)
FAMILIES = ("janus", "emu3", "chameleon", "lumina-mgpt", "imagegpt", "glm-image", "llamagen-c2i")
FAMILIES += ("llamagen-t2i",)
SIZES = {"emu3": (32, 24), "glm-image": (128, 96), "lumina-mgpt": (64, 32)}
SIZES |= {"llamagen-c2i": (64, 64), "llamagen-t2i": (64, 64)}


def captions(family: str) -> list[str]:
    """Three captions the family takes."""
    if family == "imagegpt":
        return ["", "", ""]
    return ["1", "4", "0"] if family == "llamagen-c2i" else CAPTIONS


def build_checkpoint(family: str, folder: Path) -> Path:
    """Write a checkpoint; the path that `--model` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    build = {
        "janus": _janus, "emu3": _emu3, "chameleon": _chameleon, "lumina-mgpt": _lumina,
        "imagegpt": _imagegpt, "glm-image": _glm_image, "llamagen-c2i": _c2i,
        "llamagen-t2i": _t2i,
    }  # fmt: skip
    return build[family](folder) or folder


def make_tokenizer(special: dict[str, int], first: int, size: int, **named: str) -> Any:
    """Words apart at blanks, from id `first` on; `special` are ids of whole tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = dict(special) | {word: first + k for k, word in enumerate(WORDS + NUMBERS)}
    vocabulary = {word: k for word, k in vocabulary.items() if k < size}
    free = (i for i in range(size) if i not in set(vocabulary.values()))
    vocabulary |= {f"<free{i}>": i for i in free}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", padding_side="left",
        extra_special_tokens={k: v for k, v in named.items() if k != "bos_token"},
        **{k: v for k, v in named.items() if k == "bos_token"},
    )  # fmt: skip


def _janus(folder: Path) -> None:
    import transformers as hf

    special = {"<pad>": 0, "<s>": 1, "<unk>": 2, "</s>": 3, "<image>": 5, "<boi>": 7, "<eoi>": 8}
    names = dict(image_token="<image>", boi_token="<boi>", eoi_token="<eoi>", bos_token="<s>")
    template = "<s>" + TEMPLATE
    tokenizer = make_tokenizer(special, 12, 40, **names)
    images = hf.JanusImageProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    hf.JanusProcessor(images, tokenizer, chat_template=template).save_pretrained(folder)
    build_janus().save_pretrained(folder)


def _emu3(folder: Path) -> None:
    import transformers as hf

    special = {"<pad>": 0, "<s>": 1, "<unk>": 2, "<image>": 4, "<|extra_200|>": 5, "<boi>": 6}
    special |= {"<eoi>": 7, "<wrapper>": 8, "<eof>": 9}
    names = dict(
        image_token="<image>", boi_token="<boi>", eoi_token="<eoi>", bos_token="<s>",
        image_wrapper_token="<wrapper>", eof_token="<eof>",
    )  # fmt: skip
    images = hf.Emu3ImageProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    tokenizer = make_tokenizer(special, 27, 40, **names)
    hf.Emu3Processor(images, tokenizer).save_pretrained(folder)
    build_bed("emu3").save_pretrained(folder)


def taming_weights(config: VQGANConfig) -> dict[str, torch.Tensor]:
    """Random weights of a VQGAN under the original's names, written out independently."""
    torch.manual_seed(11)
    ours = VQGAN(config).state_dict()
    last = len(config.multipliers) - 1
    named: dict[str, torch.Tensor] = {}
    for name, tensor in ours.items():
        part, *rest = name.split(".")
        if rest and rest[0] == "mid":
            rest[1] = ["block_1", "attn_1", "block_2"][int(rest[1])]
        elif rest and rest[0] == "conv_blocks":
            level = int(rest[1])
            where = ["down", str(level)] if part == "encoder" else ["up", str(last - level)]
            kind = "block" if rest[2] == "res" else rest[2]
            rest = [*where, kind, *rest[3:]]
        named[".".join([part, *rest])] = tensor
    return named | {"loss.logvar": torch.zeros(1)}


def _chameleon(folder: Path, name: str = "chameleon") -> None:
    special = {"<pad>": 0, "<s>": 1, "<unk>": 2, "<racm3:break>": 5, "<eoss>": 6}
    special |= {"<reserved08706>": 7, "<reserved08799>": 8, "<reserved08801>": 28}
    special |= {"<reserved08802>": 29}
    make_tokenizer(special, 30, 40, bos_token="<s>").save_pretrained(folder)
    model = build_bed(name)
    model.save_pretrained(folder)
    shape = model.config.vq_config
    config = VQGANConfig(
        multipliers=tuple(shape.channel_multiplier), channels=32, z_channels=8, n_codes=16,
        code_width=8, is_normalised=False, attends=False, n_blocks=1,
    )  # fmt: skip
    weights = taming_weights(config)
    own = {f"model.vqmodel.{k}": v for k, v in weights.items() if "loss" not in k}
    known = {k: v for k, v in model.state_dict().items() if k in own}
    torch.save(
        {"state_dict": weights | {k[14:]: v for k, v in known.items()}}, folder / "vqgan.ckpt"
    )


def _lumina(folder: Path) -> Path:
    folder = folder / "Lumina-mGPT-tiny"
    _chameleon(folder, "lumina")
    return folder


def _imagegpt(folder: Path) -> None:
    import transformers as hf

    torch.manual_seed(5)
    palette = (torch.rand(32, 3) * 2 - 1).tolist()
    hf.ImageGPTImageProcessor(clusters=palette).save_pretrained(folder)
    build_bed("imagegpt").save_pretrained(folder)


def _glm_image(folder: Path) -> None:
    import transformers as hf

    from tests.glm_pipeline import build_pipeline

    special = {"<pad>": 24, "<unk>": 25, "<grid>": 26, "</grid>": 27, "<image>": 50, "<boi>": 16}
    names = dict(image_token="<image>", grid_bos_token="<grid>", grid_eos_token="</grid>")
    tokenizer = make_tokenizer(special, 30, 60, bos_token="<boi>", **names)
    pipe = build_pipeline()
    generator = pipe.vision_language_encoder
    generator.config.text_config.max_position_embeddings = 2048
    generator.generation_config.temperature = 0.9
    generator.generation_config.top_p = 0.75
    generator.generation_config.do_sample = True
    images = hf.GlmImageImageProcessor()
    processor = hf.GlmImageProcessor(images, tokenizer, chat_template=TEMPLATE)
    pipe.register_modules(processor=processor, tokenizer=hf.ByT5Tokenizer(extra_ids=0))
    pipe.save_pretrained(folder)


def _llamagen(folder: Path, name: str, config: LlamaGenConfig) -> Path:
    torch.manual_seed(0)
    weights = LlamaGenTransformer(config).state_dict()
    for key, tensor in weights.items():
        if "norm" not in key:
            tensor.normal_(std=0.4)
    torch.save({"model": weights, "steps": 3}, folder / name)
    torch.manual_seed(1)
    torch.save({"model": VQGAN(VQGANConfig(n_codes=12)).state_dict()}, folder / "vq_ds16_c2i.pt")
    return folder / name


def _c2i(folder: Path) -> Path:
    config = LlamaGenConfig(768, 1, 12, vocab_size=12, block_size=16, num_classes=5)
    return _llamagen(folder, "c2i_B_64.pt", config)


def _t2i(folder: Path) -> Path:
    import transformers as hf

    config = LlamaGenConfig(
        768, 1, 12, vocab_size=12, block_size=16, cls_token_num=8, caption_dim=16
    )
    special = {"<pad>": 0, "<unk>": 1}
    make_tokenizer(special, 4, 20).save_pretrained(folder / "flan-t5-tiny")
    torch.manual_seed(2)
    shape = hf.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=20)
    hf.T5EncoderModel(shape).save_pretrained(folder / "flan-t5-tiny")
    return _llamagen(folder, "t2i_B_64.pt", config)
