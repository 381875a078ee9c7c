"""`mmaccel models`: the demo models, the methods of every slot, and what other packages bring."""

from __future__ import annotations

_OTHER_SLOTS = {  # slot -> title of its table, what a method chooses
    "drafts": ("Draft sources (--drafts)", "where drafts come from"),
    "tree": ("Trees (--tree)", "what is verified beside the drafts"),
    "siblings": ("Siblings (--set siblings=…)", "which of several drafts of a slot is accepted"),
    "kv_cache": ("Caches (--kv-cache)", "which entries of a prompt stay"),
    "attention": ("Attention (--attention)", "which keys a pass attends to"),
}


def models() -> None:
    """List the demo models, the decoding policies, and the methods that go with them."""
    from dataclasses import fields
    from pathlib import Path

    import mmaccel
    from mmaccel.catalog import (
        CLIP_MODELS,
        GROUPS,
        METHODS,
        MODELS,
        POLICIES,
        REDUCERS,
        SPOKEN_MODELS,
        TEXT_MODELS,
        VISION_MODELS,
        load,
        make_policy,
    )
    from mmaccel.commands.terminal import make_table, wide_console
    from mmaccel.own_code import installed
    from mmaccel.samplers.drafting.coarse_model import find_coarse

    console = wide_console()
    weights = Path(mmaccel.__file__).parent / "demo" / "weights"
    table = make_table("model", "coarse drafts", "what", title="Demo models")
    summaries = {name: model.summary for name, model in (MODELS | CLIP_MODELS).items()}
    summaries |= SPOKEN_MODELS | TEXT_MODELS | VISION_MODELS
    for name, summary in summaries.items():
        has_coarse = find_coarse(weights / name) is not None
        table.add_row(name, "yes" if has_coarse else "-", summary)
    console.print(table)
    table = make_table("policy", "decodes", "exactness", "options", "what", title="Policies")
    for name, entry in POLICIES.items():
        policy = make_policy(name)
        own = [f.name for f in fields(policy) if f.name not in entry.preset]
        table.add_row(name, entry.slot, policy.exactness, ", ".join(own), entry.summary)
    console.print(table)
    console.print(
        "bitwise: same seed, same tokens as token by token. distribution: the same distribution. "
        "relaxed: other images; the stats have the total variation spent."
    )
    title = "Visual tokens"
    table = make_table("method", "stage", "options", "what stays", title=title)
    for name, reducer in REDUCERS.items():
        method = load(reducer.target)
        own = [f.name for f in fields(method)]
        stage = method.stage.replace("_", " ").replace("llm", "language model's")
        table.add_row(name, stage, ", ".join(own), reducer.summary)
    console.print(table)
    for slot, (title, what) in _OTHER_SLOTS.items():
        table = make_table("name", "options", what, title=title)
        for name, entry in METHODS[slot].items():
            own = [f.name for f in fields(load(entry.target))]
            table.add_row(name, ", ".join(own), entry.summary)
        console.print(table)
    table = make_table("name", "goes into", "from", title="Of other packages")
    for slot in dict.fromkeys(GROUPS.get(slot, slot) for slot in METHODS):
        for name, target in installed(slot).items():
            table.add_row(name, slot, target)
    if table.rows:
        console.print(table)
