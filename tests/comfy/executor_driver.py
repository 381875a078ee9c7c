"""Runs graphs by ComfyUI's executor in one process, without a server; in ComfyUI's Python.

    python executor_driver.py COMFYUI BASE < job.json > result.json

A job is `{"graph": API graph, "bad": another that is to be refused, "stop_at": passes}`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from importlib import import_module
from typing import Any


def main() -> None:
    """The graph twice, then the bad one, then the graph with another seed and an interrupt."""
    home, base = sys.argv[1:3]
    os.chdir(home)
    sys.path.insert(0, home)
    sys.argv = ["main.py", "--cpu", "--base-directory", base, "--disable-api-nodes"]
    shown, sys.stdout = sys.stdout, sys.stderr  # what nodes print is no result
    import comfy.options

    comfy.options.enable_args_parsing()
    import_module("utils.extra_config")  # before a node's `utils` can take its name

    import execution
    import nodes
    import server

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    prompt_server = server.PromptServer(loop)
    loop.run_until_complete(nodes.init_extra_nodes(init_api_nodes=False))
    caches = {"lru": 0, "ram": 0.0, "ram_inactive": 0.0}
    executor = execution.PromptExecutor(prompt_server, cache_args=caches)
    job = json.load(sys.stdin)

    def run(graph: dict[str, Any], name: str) -> dict[str, Any]:
        good, error, outputs, node_errors = loop.run_until_complete(
            execution.validate_prompt(name, graph, None)
        )
        if not good:
            return {"valid": False, "error": error, "node_errors": node_errors}
        loop.run_until_complete(executor.execute_async(graph, name, {}, outputs))
        return {
            "valid": True,
            "messages": executor.status_messages,
            "outputs": executor.history_result["outputs"],
        }

    found: dict[str, Any] = {"nodes": [n for n in nodes.NODE_CLASS_MAPPINGS if "MMAccel" in n]}
    found["first"], found["second"] = run(job["graph"], "a"), run(job["graph"], "b")
    found["bad"] = run(job["bad"], "c")
    from mmaccel.comfy.loading import CACHE

    (model,) = CACHE
    window = model.pipe.model
    found["inference"] = any(p.is_inference() for p in window.model.parameters())
    counts, passes = [window.forward], []

    def counted(*arguments: Any, **options: Any) -> Any:
        passes.append(1)
        if len(passes) == job["stop_at"]:
            nodes.interrupt_processing()
        return counts[0](*arguments, **options)

    window.forward = counted
    for node in job["graph"].values():
        if "seed" in node["inputs"]:
            node["inputs"]["seed"] += 1000
    found["stopped"], found["passes"] = run(job["graph"], "d"), len(passes)
    del window.forward
    found["after"] = run(job["graph"], "e")
    counts.pop()
    del model, window
    executor.reset()  # what ComfyUI does where the user frees its cache
    gc.collect()
    found["cached"] = len(CACHE)
    print(json.dumps(found), file=shown)


if __name__ == "__main__":
    main()
