"""Coarse models in the folders of models: states, where they are found, which ones are refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

import mmaccel
from mmaccel.pipelines.hosts.attach.attaching import family_of
from mmaccel.pipelines.hosts.loading.sources import content_hash
from mmaccel.samplers.drafting import coarse
from mmaccel.samplers.drafting.coarse_model import CoarseConfig, CoarseModel, save_coarse
from mmaccel.samplers.drafting.opened import opened_for
from tests.fixtures.checkpoints import FAMILIES, SIZES, build_checkpoint, captions
from tests.fixtures.lanes import mostly_slow
from tests.fixtures.media import MEDIA, SECONDS, TEXTS, build_media, image, open_media
from tests.fixtures.tiny_lms import build_lm

WINDOW = 8


def save_random(window, folder: Path, layout=None) -> mmaccel.Coarse:
    """A random coarse model for a token model and the grid of a layout."""
    torch.manual_seed(0)
    output = window.output_matrix()
    grid = {} if layout is None else {"columns": layout.columns, "frame": layout.frame}
    config = CoarseConfig(*output.shape, width=16, embedding=8, **grid)
    model = CoarseModel(config, output)
    with torch.no_grad():
        model.out.weight.mul_(20)
    save_coarse(model, folder, {})
    return mmaccel.Coarse(str(folder))


def open_llamagen(folder: Path) -> mmaccel.TextToImage:
    """A LlamaGen of 4 x 4 tokens with a coarse model in its folder."""
    file = build_checkpoint("llamagen-c2i", folder)
    pipe = mmaccel.TextToImage.from_pretrained(file, size=(64, 64))
    save_random(pipe.model, file.parent, pipe.image_model.layout)
    return mmaccel.TextToImage.from_pretrained(file, size=(64, 64))


def check_states(window, call) -> None:
    """The states that a model hands out, times its output matrix, are its logits up to a bias."""
    found, forward = [], window.forward

    def record(entries):
        logits = forward(entries)
        wrong = window.last_states.float() @ window.output_matrix().float().T - logits
        found.append((wrong - wrong[:1, :1]).abs().max())
        return logits

    window.forward = record
    try:
        call()
    finally:
        window.forward = forward
    assert found and max(found) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_image_models_draft_with_the_coarse_model_in_their_folder(family, tmp_path):
    source, size = build_checkpoint(family, tmp_path / family), SIZES.get(family)
    pipe = mmaccel.TextToImage.from_pretrained(source, size=size)
    folder = source if source.is_dir() else source.parent
    assert pipe.model.coarse is None
    own = save_random(pipe.model, folder, pipe.image_model.layout)
    found = mmaccel.TextToImage.from_pretrained(source, size=size)
    assert found.model.coarse == folder

    def draw(drafts, pipe=found):
        policy = mmaccel.Jacobi(WINDOW, drafts)
        return pipe(captions(family)[0], policy=policy, seed=3, output_type="tokens")

    plain = draw("neighbour")
    for fused in (False, "auto"):
        other = mmaccel.TextToImage.from_pretrained(source, size=size, fused=fused)
        check_states(other.model, lambda: draw(own, other))  # noqa: B023
    for drafts in ("auto", own):
        drawn = draw(drafts)
        assert torch.equal(drawn.tokens, plain.tokens)
        assert not drawn.stats.notes and opened_for(found.model)


@pytest.mark.parametrize("kind", mostly_slow(MEDIA, "llasa"))
def test_media_models_draft_with_the_coarse_model_in_their_folder(kind, tmp_path):
    folders = build_media(kind, tmp_path)
    pipe = open_media(kind, folders)
    layout = pipe.video.layout if kind == "cosmos" else None
    own = save_random(pipe.model, folders[0], layout)
    found = open_media(kind, folders)
    assert found.model.coarse == folders[0]

    def make(drafts):
        options = {"policy": mmaccel.Jacobi(WINDOW, drafts), "seed": 3}
        if kind == "cosmos":
            return found(image(), **options)
        return found(TEXTS[0], max_seconds=SECONDS[kind], **options)

    plain = make("neighbour")
    check_states(found.model, lambda: make(own))
    drawn = make("auto")
    assert torch.equal(drawn[0].tokens, plain[0].tokens)
    assert drawn.stats.passes == make(own).stats.passes and opened_for(found.model)


def test_attached_models_open_the_coarse_model_of_their_folder_once(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    build_lm("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[5, 6, 7]])
    own = save_random(family_of(model).wrap(model), tmp_path)
    opened, load = [], coarse.load_coarse
    monkeypatch.setattr(coarse, "load_coarse", lambda *args: opened.append(1) or load(*args))

    def generate(drafts, calls=1):
        with mmaccel.attach(model, mmaccel.Jacobi(WINDOW, drafts), seed=0) as handle:
            for _ in range(calls):
                made = model.generate(ids, max_new_tokens=40, do_sample=True, top_k=0)
        return made, handle.stats.passes

    plain, n_plain = generate("neighbour")
    made, n_auto = generate("auto", calls=2)
    assert len(opened) == 1
    assert torch.equal(made, plain)
    assert n_auto == generate(own)[1] != n_plain


@pytest.mark.slow
def test_a_coarse_model_of_another_grid_is_not_used_by_auto(tmp_path):
    larger = open_llamagen(tmp_path).resize((128, 128))
    made = larger("1", policy=mmaccel.Jacobi(WINDOW), seed=2)
    assert "no coarse drafts" in made.stats.notes[0]
    plain = larger("1", policy=mmaccel.Jacobi(WINDOW, "neighbour"), seed=2)
    assert torch.equal(made.tokens, plain.tokens) and made.stats.passes == plain.stats.passes


def test_facts_of_an_image_name_the_coarse_model_where_its_tokens_depend_on_it(tmp_path):
    """Jacobi makes the same tokens with any, so that its images keep their names."""
    source = build_checkpoint("janus", tmp_path / "janus")
    pipe = mmaccel.TextToImage.from_pretrained(source)
    before = content_hash(source)
    first = save_random(pipe.model, source, pipe.image_model.layout)
    pipe = mmaccel.TextToImage.from_pretrained(source)
    assert content_hash(source) == before
    policies = [mmaccel.SpeculativeJacobi(drafts=drafts) for drafts in ("auto", "coarse", first)]
    facts = [coarse.coarse_facts(policy, pipe.model) for policy in policies]
    digest = hashlib.sha256((source / "coarse.safetensors").read_bytes()).hexdigest()
    assert facts == [{"coarse": digest}] * 3
    bitwise = [mmaccel.Jacobi(drafts=first), mmaccel.SpeculativeJacobi(), mmaccel.Autoregressive()]
    assert [coarse.coarse_facts(policy, pipe.model) for policy in bitwise] == [{}] * 3
