"""`mmaccel models`: the demo models, the policies, the methods for visual tokens, and what other
packages bring.
"""

from __future__ import annotations


def models() -> None:
    """List the demo models, the decoding policies, and the methods for visual tokens."""
    from dataclasses import fields
    from pathlib import Path

    import mmaccel
    from mmaccel.catalog import (
        MODELS,
        POLICIES,
        REDUCERS,
        TEXT_MODELS,
        VISION_MODELS,
        load,
        make_policy,
    )
    from mmaccel.commands.terminal import make_table, wide_console
    from mmaccel.own_code import installed
    from mmaccel.samplers.drafting.coarse_model import find_coarse

    console, weights = wide_console(), Path(mmaccel.__file__).parent / "demo" / "weights"
    table = make_table("model", "coarse drafts", "what", title="Demo models")
    summaries = {name: model.summary for name, model in MODELS.items()}
    summaries |= TEXT_MODELS | VISION_MODELS
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
    table = make_table("name", "is a", "from", title="Of other packages")
    for slot, kind in (("policies", "policy"), ("drafts", "draft source"), ("reducers", "method")):
        for name, target in installed(slot).items():
            table.add_row(name, kind, target)
    if table.rows:
        console.print(table)
