"""`mmaccel models`: the demo models and the policies."""

from __future__ import annotations


def models() -> None:
    """List the demo models and the decoding policies, with the exactness of each policy."""
    from dataclasses import fields

    from mmaccel.catalog import MODELS, POLICIES, TEXT_MODELS, make_policy
    from mmaccel.commands.terminal import make_table, wide_console

    console = wide_console()
    table = make_table("model", "what", title="Demo models")
    for name, model in MODELS.items():
        table.add_row(name, model.summary)
    for name, summary in TEXT_MODELS.items():
        table.add_row(name, summary)
    console.print(table)
    table = make_table("policy", "decodes", "exactness", "options", "what", title="Policies")
    for name, entry in POLICIES.items():
        policy = make_policy(name)
        own = [f.name for f in fields(policy) if f.name not in entry.preset]
        table.add_row(name, entry.kind, policy.exactness, ", ".join(own), entry.summary)
    console.print(table)
    console.print(
        "bitwise: same seed, same tokens as token by token. distribution: the same distribution. "
        "relaxed: other images; the stats have the total variation spent."
    )
