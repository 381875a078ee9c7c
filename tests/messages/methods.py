"""Methods given to `attach` and to policies: wrong slots, names, budgets and trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import mmaccel
from tests.fixtures import diffusion_gemma, llada2
from tests.fixtures.canvas import masked
from tests.fixtures.checkpoints import SIZES, build_checkpoint, captions
from tests.fixtures.denoiser_targets import TARGETS
from tests.fixtures.fused_lms import build_decoder
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import ToyLanguage
from tests.messages.case import Refused

_REROTATING = mmaccel.StreamingLLM(budget=64, rerotate=True)


def _attach(*args: Any, **methods: Any) -> Any:
    return lambda: mmaccel.attach(build_lm("llama"), *args, **methods)


def _draw(family: str, **methods: Any) -> Any:
    def call() -> None:
        with TemporaryDirectory() as folder:
            source: Any = "scenes-masked"
            if family != source:
                source = build_checkpoint(family, Path(folder))
            pipe = mmaccel.TextToImage.from_pretrained(source, device="cpu", size=SIZES.get(family))
            text = pipe.image_model.examples[0] if family == source else captions(family)[0]
            pipe(text, **methods)

    return call


def _attach_to(build: Callable[[], Any], *args: Any, **methods: Any) -> Any:
    return lambda: mmaccel.attach(build(), *args, **methods)


def _decode(*args: Any, **methods: Any) -> Any:
    def call() -> None:
        model = build_lm("llama")
        with mmaccel.attach(model, *args, strict=True, **methods):
            model.generate(torch.arange(4, 24)[None], max_new_tokens=4, do_sample=False)

    return call


BLOCKS = mmaccel.Stepwise(cache="block")
CASES = (
    Refused(
        "a selector of blocks as a cache policy",
        _attach("jacobi", kv_cache=mmaccel.Quest()),
        says=("kv_cache", "SnapKV", "Quest goes into attention="),
    ),
    Refused(
        "a cache policy as a selector of blocks",
        _attach("jacobi", attention=mmaccel.SnapKV()),
        says=("attention", "Quest", "SnapKV goes into kv_cache="),
    ),
    Refused(
        "a reducer of visual tokens as a cache policy",
        _attach("jacobi", kv_cache=mmaccel.DART(keep=0.5, layer=1)),
        says=("kv_cache", "SnapKV", "DART goes into visual_tokens="),
    ),
    Refused(
        "a cache policy among reducers of visual tokens",
        _attach("jacobi", visual_tokens=[mmaccel.SnapKV()]),
        says=("visual_tokens", "DART", "SnapKV goes into kv_cache="),
    ),
    Refused(
        "a class in place of a cache policy",
        _attach("jacobi", kv_cache=mmaccel.SnapKV),
        says=("kv_cache", "SnapKV(budget=1024)", "instance"),
    ),
    Refused(
        "a selector for prompts beside a prompt in chunks",
        _attach("jacobi", attention=mmaccel.XAttention(), prefill_chunk_size=8),
        says=("prefill_chunk_size", "XAttention", "all queries of the prompt", "leave"),
    ),
    Refused(
        "a method that processes a prompt twice beside a prompt in chunks",
        _attach("jacobi", kv_cache=mmaccel.KVzip(budget=64), prefill_chunk_size=8),
        says=("prefill_chunk_size", "KVzip", "twice", "leave"),
    ),
    Refused(
        "a name that no cache policy has",
        _attach("jacobi", kv_cache="snapkw"),
        says=("kv_cache", "'snapkw'", "snapkv"),
    ),
    Refused(
        "the name of a method of another slot",
        _attach("jacobi", kv_cache="quest"),
        says=("kv_cache", "'quest'", "quest goes into attention="),
    ),
    Refused(
        "a dictionary without a name",
        _attach("jacobi", kv_cache={"budget": 8}),
        says=("kv_cache", "name", "snapkv"),
    ),
    Refused(
        "a field that the method lacks",
        _attach("jacobi", kv_cache={"name": "snapkv", "bugdet": 8}),
        says=("snapkv", "'bugdet'", "budget"),
    ),
    Refused(
        "rounds of eviction beside a tree",
        _attach(
            mmaccel.Jacobi(window=8, drafts="token-recycling", tree=mmaccel.Comb(2, 3)),
            kv_cache=mmaccel.TOVA(every=8),
        ),
        says=("kv_cache", "TOVA(every=8)", "a chain", "leave tree or every out"),
    ),
    Refused(
        "rounds of eviction beside sparse attention",
        _attach("jacobi", kv_cache=mmaccel.TOVA(every=64), attention=mmaccel.Quest()),
        says=("kv_cache", "TOVA(every=64)", "no attention", "Quest"),
    ),
    Refused(
        "rounds that are narrower than a window",
        _attach(mmaccel.Jacobi(window=9), kv_cache=mmaccel.TOVA(every=8)),
        says=("kv_cache", "TOVA(every=8)", "at most 8", "window=9", "narrower window"),
    ),
    Refused(
        "rounds beside a window that may become wider",
        _attach(mmaccel.Jacobi(window="adaptive"), kv_cache=mmaccel.TOVA(every=8)),
        says=("kv_cache", "a fixed window", "adaptive", "up to 8"),
    ),
    Refused(
        "rounds beside drafts of the model's own",
        _decode(mmaccel.Speculative(4, drafts="vegas"), kv_cache=mmaccel.TOVA(every=8)),
        says=("drafts", "Vegas", "TOVA(budget=1024, every=8)", "another source"),
    ),
    Refused(
        "rounds of eviction over a canvas",
        _attach_to(TARGETS["masked-lm"], BLOCKS, kv_cache=mmaccel.TOVA(every=64)),
        says=("kv_cache", "evicted once", "leave every out"),
        error=mmaccel.UnsupportedModelError,
    ),
    Refused(
        "rounds of eviction in LlamaGen that would begin with a prompt of zero keys",
        _draw("llamagen-t2i", kv_cache={"name": "tova", "every": 64, "budget": 2}),
        says=("kv_cache", "LlamaGenTransformer", "keys of its prompt are zero", "a budget of"),
        error=mmaccel.UnsupportedModelError,
    ),
    Refused(
        "sparse attention over heads of different lengths",
        _attach("jacobi", kv_cache="kvzap", attention="quest"),
        says=("attention", "KVzap", "Quest", "different numbers", "SnapKV"),
    ),
    Refused(
        "drafts of the model's own over heads of different lengths",
        _decode(mmaccel.Speculative(4, drafts="vegas"), kv_cache=mmaccel.KVzap()),
        says=("drafts", "Vegas", "KVzap", "another source"),
    ),
    Refused(
        "heads of different lengths over a canvas",
        _attach_to(TARGETS["masked-lm"], BLOCKS, kv_cache=mmaccel.KVzap()),
        says=("kv_cache", "heads would hold different ones", "leave kv_cache out"),
        error=mmaccel.UnsupportedModelError,
    ),
    Refused(
        "heads of different lengths in LlamaGen",
        _draw("llamagen-t2i", kv_cache="duo-attention"),
        says=("kv_cache", "keys of its prompt are zero", "DuoAttention"),
        error=mmaccel.UnsupportedModelError,
    ),
    Refused(
        "a quantised cache beside a tree",
        _attach(
            mmaccel.Jacobi(window=8, drafts="token-recycling", tree=mmaccel.Comb(2, 3)),
            kv_cache=mmaccel.QuantizedCache(),
        ),
        says=("kv_cache", "QuantizedCache(", "a chain", "leave tree or QuantizedCache out"),
    ),
    Refused(
        "a quantised cache beside sparse attention",
        _attach("jacobi", kv_cache="quantized-cache", attention=mmaccel.Quest()),
        says=("kv_cache", "QuantizedCache(", "no attention", "Quest"),
    ),
    Refused(
        "a window that is wider than the entries that stay whole",
        _attach(mmaccel.Jacobi(window=9), kv_cache=mmaccel.QuantizedCache(residual=8)),
        says=("kv_cache", "residual=8", "at most 8", "window=9", "larger group and residual"),
    ),
    Refused(
        "a quantised cache beside a window that may become wider",
        _attach(mmaccel.Jacobi(window="adaptive"), kv_cache=mmaccel.QuantizedCache(group=8)),
        says=("kv_cache", "group=8", "a fixed window", "adaptive", "up to 8"),
    ),
    Refused(
        "a quantised cache beside drafts of the model's own",
        _decode(mmaccel.Speculative(4, drafts="vegas"), kv_cache=mmaccel.QuantizedCache()),
        says=("drafts", "Vegas", "QuantizedCache(", "another source"),
    ),
    Refused(
        "a quantised cache of a canvas",
        _attach_to(TARGETS["masked-lm"], BLOCKS, kv_cache=mmaccel.QuantizedCache()),
        says=("kv_cache", "stays as it is", "leave QuantizedCache out"),
        error=mmaccel.UnsupportedModelError,
    ),
    Refused(
        "a quantised cache of LlamaGen",
        _draw("llamagen-t2i", kv_cache="quantized-cache"),
        says=("kv_cache", "LlamaGenTransformer", "stays as it is", "leave QuantizedCache out"),
        error=mmaccel.UnsupportedModelError,
    ),
    Refused(
        "a quantised cache over a name",
        lambda: mmaccel.QuantizedCache(over="snapkv"),  # type: ignore[arg-type]
        says=("QuantizedCache.over", "SnapKV(budget=1024)", "'snapkv'", "give an instance"),
    ),
    Refused(
        "a quantised cache over rounds of eviction",
        lambda: mmaccel.QuantizedCache(over=mmaccel.TOVA(every=8)),
        says=("QuantizedCache.over", "asked once", "TOVA(budget=1024, every=8)", "every out"),
    ),
    Refused(
        "a quantised cache over heads of different lengths",
        lambda: mmaccel.QuantizedCache(over=mmaccel.KVzap()),
        says=("QuantizedCache.over", "all heads", "KVzap(budget=128", "SnapKV"),
    ),
    Refused("a budget of nothing", lambda: mmaccel.SnapKV(budget=0), says=("budget", "0")),
    Refused(
        "fewer than no sinks",
        lambda: mmaccel.StreamingLLM(sinks=-1),
        says=("StreamingLLM.sinks", ">= 0", "-1", "4 suits"),
    ),
    Refused(
        "half a sink",
        lambda: mmaccel.StreamingLLM(sinks=0.5),  # type: ignore[arg-type]
        says=("StreamingLLM.sinks", "an integer", "0.5"),
    ),
    Refused(
        "sinks that fill the budget",
        lambda: mmaccel.StreamingLLM(budget=4),
        says=("StreamingLLM.sinks", "the budget of 4", "received 4", "larger budget", "fewer"),
    ),
    Refused(
        "more than all blocks",
        lambda: mmaccel.DHSA(budget=1.5),
        says=("DHSA.budget", "1.5", "1 attends to all"),
    ),
    Refused(
        "a share of nothing",
        lambda: mmaccel.TopP(p=0),
        says=("TopP.p", "0", "share of the estimated attention"),
    ),
    Refused(
        "an estimate that there is none of",
        lambda: mmaccel.TopP(estimate="medians"),  # type: ignore[arg-type]
        says=("TopP.estimate", "means, bounds", "'medians'"),
    ),
    Refused(
        "a choice anew before the first one",
        lambda: mmaccel.TidalDecode(first_layer=4, reselect=4),
        says=("TidalDecode.reselect", ">= 5", "4", "after first_layer"),
    ),
    Refused(
        "a cosine above 1",
        lambda: mmaccel.TokenSelect(similarity=1.5),
        says=("TokenSelect.similarity", "1.5", "0.9 suits"),
    ),
    Refused(
        "a stride that does not divide a block",
        lambda: mmaccel.XAttention(stride=7),
        says=("XAttention.stride", "divisor of the block of 64", "7", "try 8"),
    ),
    Refused(
        "a share of no attention",
        lambda: mmaccel.XAttention(threshold=0),
        says=("XAttention.threshold", "0", "1 computes all"),
    ),
    Refused(
        "a chunk that cuts a block",
        lambda: mmaccel.VideoChunks(chunk=100),
        says=("VideoChunks.chunk", "multiple of the block of 64", "100", "try 128"),
    ),
    Refused(
        "a question of fewer than no tokens",
        lambda: mmaccel.VideoChunks(question=-1),
        says=("VideoChunks.question", ">= 0", "-1"),
    ),
    Refused(
        "a calibration by no queries",
        lambda: mmaccel.MInference(window=0),
        says=("MInference.window", ">= 1", "0"),
    ),
    Refused(
        "a selector for prompts where the prompt is a condition",
        _draw("llamagen-t2i", attention="x-attention"),
        says=("attention", "LlamaGenTransformer", "XAttention is for long prompts"),
        error=mmaccel.UnsupportedModelError,
    ),
    Refused(
        "a window of nothing",
        lambda: mmaccel.LocalWindow(window=0),
        says=("LocalWindow.window", ">= 1", "0"),
    ),
    Refused(
        "a row of fewer than no tokens",
        lambda: mmaccel.LocalWindow(columns=-1),
        says=("LocalWindow.columns", "-1", "0 reads the last"),
    ),
    Refused(
        "neighbours that are none",
        lambda: mmaccel.LocalWindow(columns=8, radius=0),
        says=("LocalWindow.radius", "1..256", "0"),
    ),
    Refused(
        "a choice that layers share beside an eviction",
        _attach("jacobi", kv_cache="snapkv", attention=mmaccel.TidalDecode()),
        says=("attention", "TidalDecode", "SnapKV", "different entries", "Quest"),
    ),
    Refused(
        "an n-gram of no token",
        lambda: mmaccel.HierarchyDrafting(ngram=0),
        says=("HierarchyDrafting.ngram", "1..64", "0", "2 suits"),
    ),
    Refused(
        "an n-gram that is no number",
        lambda: mmaccel.HierarchyDrafting(ngram=True),
        says=("HierarchyDrafting.ngram", "an integer", "True"),
    ),
    Refused(
        "no occurrence of a tri-gram",
        lambda: mmaccel.ADED(occurrences=0),
        says=("ADED.occurrences", "1..256", "0", "16 suits"),
    ),
    Refused(
        "distributions behind no token",
        lambda: mmaccel.STAND(ngram=0),
        says=("STAND.ngram", "1..64", "0", "3 suits"),
    ),
    Refused(
        "siblings that have said nothing",
        lambda: mmaccel.SiblingRows(ngram=0),
        says=("SiblingRows.ngram", "1..64", "0", "3 suits"),
    ),
    Refused(
        "n-grams of guesses of one token",
        lambda: mmaccel.Lookahead(ngram=1),
        says=("Lookahead.ngram", "2..16", "1", "4 suits"),
    ),
    Refused(
        "a pool of nothing",
        lambda: mmaccel.Lookahead(pool=0),
        says=("Lookahead.pool", "16..65536", "0", "1024 suits"),
    ),
    Refused(
        "siblings under a policy that is exact in distribution",
        lambda: mmaccel.SpeculativeJacobi(window=8, drafts="sibling-rows"),
        says=("drafts='sibling-rows'", "bitwise", "distribution", "token-recycling"),
    ),
    Refused(
        "a bandit under a policy that is exact in distribution",
        lambda: mmaccel.Speculative(window=8, drafts="bandit"),
        says=("drafts='bandit'", "bitwise", "distribution", "token-recycling"),
    ),
    Refused(
        "guesses under a policy whose tokens depend on drafts",
        lambda: mmaccel.RowParallel(drafts="lookahead"),
        says=("drafts='lookahead'", "accepted tokens alone", "auto"),
    ),
    Refused(
        "a source text that is a text",
        lambda: mmaccel.SourceText("for i in x"),  # type: ignore[arg-type]
        says=("SourceText.tokens", "ids", "for i in x", "tokenizer(text)"),
    ),
    Refused(
        "a source text with padding",
        lambda: mmaccel.SourceText((3, -1)),
        says=("SourceText.tokens", ">= 0", "-1"),
    ),
    Refused(
        "a source image of nothing",
        lambda: mmaccel.SourceImage(()),
        says=("SourceImage.tokens", "ids", "()"),
    ),
    Refused(
        "a realignment at no token",
        lambda: mmaccel.SourceText((3, 1), ngram=0),
        says=("SourceText.ngram", "1..8", "0"),
    ),
    Refused(
        "a draft model that is none",
        lambda: mmaccel.DraftModel("small"),  # type: ignore[arg-type]
        says=("DraftModel.model", "causal LM", "small", "AutoModelForCausalLM"),
    ),
    Refused(
        "a length that is a number",
        lambda: mmaccel.DraftModel(build_lm("llama"), length=4),  # type: ignore[arg-type]
        says=("DraftModel.length", "SVIP()", "4", "leave length out"),
    ),
    Refused(
        "an entropy below nothing",
        lambda: mmaccel.SVIP(-1.0),
        says=("SVIP.threshold", "-1", "0.6"),
    ),
    Refused(
        "a chance above one",
        lambda: mmaccel.SpecDecPP(1.5),
        says=("SpecDecPP.threshold", "1.5", "0.7"),
    ),
    Refused(
        "a classifier that asks for more than certainty",
        lambda: mmaccel.DISCO(threshold=2.0),
        says=("DISCO.threshold", "2", "0.4"),
    ),
    Refused(
        "a bandit without arms",
        lambda: mmaccel.BanditSpec(sources=()),
        says=("BanditSpec.sources", "different classes", "()"),
    ),
    Refused(
        "two arms of one class",
        lambda: mmaccel.BanditSpec(sources=(mmaccel.ADED(), mmaccel.ADED(4))),
        says=("BanditSpec.sources", "different classes", "ADED"),
    ),
    Refused(
        "an arm that is a name",
        lambda: mmaccel.BanditSpec(sources=("aded",)),  # type: ignore[arg-type]
        says=("BanditSpec.sources", "draft sources", "aded"),
    ),
    Refused(
        "an arm with layers of its own",
        lambda: mmaccel.BanditSpec(sources=(mmaccel.Vegas(),)),
        says=("BanditSpec.sources", "tokens and the scores", "Vegas"),
    ),
    Refused(
        "an arm of one token",
        lambda: mmaccel.BanditSpec(widths=(1, 4)),
        says=("BanditSpec.widths", "2..1024", "received 1;"),
    ),
    Refused(
        "a pass that costs less than nothing",
        lambda: mmaccel.BanditSpec(token_cost=-0.1),
        says=("BanditSpec.token_cost", "-0.1", "0.03"),
    ),
    Refused(
        "drafts of other rows under a policy that is exact in distribution",
        lambda: mmaccel.SpeculativeJacobi(window=8, drafts="hierarchy"),
        says=("drafts='hierarchy'", "bitwise", "distribution", "token-recycling"),
    ),
    Refused(
        "a tree deeper than the window",
        lambda: mmaccel.Jacobi(window=4, tree=mmaccel.Comb(branches=2, length=7)),
        says=("tree", "window=4", "7"),
    ),
    Refused(
        "a tree whose drafts have no alternatives",
        lambda: mmaccel.Jacobi(window=8, drafts="neighbour", tree=mmaccel.Comb(2, 3)),
        says=("tree", "Neighbour", "drafts='coarse'"),
    ),
    Refused(
        "likeliest nodes of drafts that name no children",
        lambda: mmaccel.Jacobi(window=16, drafts="ngram", tree=mmaccel.DySpec()),
        says=("tree", "DySpec", "NGram", "drafts='coarse'"),
    ),
    Refused(
        "chances of acceptance that are none",
        lambda: mmaccel.Sequoia(acceptance=((0.9, 0.2),)),
        says=("acceptance", "0.9", "sum up to 1"),
    ),
    Refused(
        "a rule of siblings that is none",
        lambda: mmaccel.Speculative(siblings="first"),  # type: ignore[arg-type]
        says=("siblings", "mmaccel.RSD()", "first"),
    ),
    Refused(
        "a tree that no draft model draws",
        lambda: mmaccel.Speculative(8, ToyLanguage(), tree=mmaccel.DySpec(4, depth=2)),
        says=("tree", "DySpec", "DraftModel"),
    ),
    Refused(
        "nodes that rows share under a policy that draws",
        lambda: mmaccel.Speculative(8, tree=mmaccel.TETRIS(8, 2, 6, 4), drafts="token-recycling"),
        says=("expected a bitwise policy", "TETRIS", "mmaccel.DySpec(nodes=8)"),
    ),
    Refused(
        "a model among the sources of a bandit",
        lambda: mmaccel.BanditSpec((mmaccel.DraftModel(ToyLanguage()),)),
        says=("sources that read tokens and the scores of passes alone", "DraftModel"),
    ),
    Refused(
        "a budget of a batch beyond the nodes of its rows",
        lambda: mmaccel.TETRIS(nodes=8, budget=9),
        says=("TETRIS.budget", "9"),
    ),
    Refused(
        "a tree beside sparse attention",
        _attach(
            mmaccel.Jacobi(window=8, drafts="token-recycling", tree=mmaccel.Comb(2, 3)),
            attention=mmaccel.Quest(),
        ),
        says=("attention", "tree"),
    ),
    *(
        Refused(
            f"consecutive positions, {name}",
            _attach_to(build, policy, kv_cache=_REROTATING),
            says=("kv_cache", *said, "leave rerotate out"),
            error=mmaccel.UnsupportedModelError,
        )
        for name, build, policy, said in (
            ("learned", lambda: build_lm("gpt2"), "jacobi", ("GPT2LMHeadModel", "learned")),
            ("three axes", lambda: build_decoder("qwen2_vl"), "jacobi", ("angles", "number")),
            ("unknown", lambda: build_decoder("olmo"), "jacobi", ("not known", "OlmoDecoder")),
            ("of a canvas", TARGETS["masked-lm"], BLOCKS, ("canvas",)),
        )
    ),
    Refused(
        "consecutive positions of a grid",
        _draw("llamagen-t2i", kv_cache=_REROTATING),
        says=("kv_cache", "LlamaGenTransformer", "a grid", "leave rerotate out"),
        error=mmaccel.UnsupportedModelError,
    ),
    Refused(
        "a cache policy for a prompt of one label",
        _draw("llamagen-c2i", kv_cache="snapkv"),
        says=("kv_cache", "LlamaGenTransformer", "one class label", "leave kv_cache out"),
        error=mmaccel.UnsupportedModelError,
    ),
    Refused(
        "votes by attention where the prompt's keys are zero",
        _draw("llamagen-t2i", kv_cache="snapkv"),
        says=("kv_cache", "LlamaGenTransformer", "keys of its prompt are zero", "SnapKV"),
        error=mmaccel.UnsupportedModelError,
    ),
    Refused(
        "sparse attention on a canvas that is computed whole",
        _draw("scenes-masked", attention="quest"),
        says=("attention", "leave attention out"),
        error=mmaccel.UnsupportedModelError,
    ),
    Refused(
        "a canvas policy that keeps no blocks",
        _attach_to(TARGETS["masked-lm"], "stepwise", kv_cache="snapkv"),
        says=("kv_cache", "finished blocks", "Stepwise", 'cache="block"'),
    ),
    Refused(
        "a denoiser whose entries attend to later ones",
        _attach_to(masked, "stepwise", attention="quest"),
        says=("attention", "attend to later ones", "leave attention out"),
        error=mmaccel.UnsupportedModelError,
    ),
    Refused(
        "a denoiser without a cache",
        _attach_to(TARGETS["llada"], "stepwise", kv_cache="snapkv"),
        says=("kv_cache", "computes everything anew", "leave kv_cache out"),
        error=mmaccel.UnsupportedModelError,
    ),
    Refused(
        "a denoiser whose layers attend by code of their own",
        _attach_to(TARGETS["sdar"], BLOCKS, kv_cache="snapkv", attention="quest"),
        says=("kv_cache and attention", "code of its checkpoint"),
        error=mmaccel.UnsupportedModelError,
    ),
    Refused(
        "a pipeline's own decoder over cached blocks",
        _attach_to(lambda: llada2.build_pipe("blocks"), "cached-blocks", kv_cache="snapkv"),
        says=("kv_cache", "LLaDA2Pipeline", "CachedBlocks", "canvas policy"),
        error=mmaccel.UnsupportedModelError,
    ),
    Refused(
        "a prompt in the library's own cache",
        _attach_to(diffusion_gemma.build_model, mmaccel.EntropyBounded(), attention="quest"),
        says=("attention", "DiffusionGemma", "library's own cache"),
        error=mmaccel.UnsupportedModelError,
    ),
    Refused(
        "a tree beside sparse attention in a pipeline",
        _draw(
            "llamagen-c2i",
            policy=mmaccel.Jacobi(window=8, drafts="token-recycling", tree=mmaccel.Comb(2, 3)),
            attention="quest",
        ),
        says=("attention", "tree"),
    ),
)
