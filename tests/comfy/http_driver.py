"""Talks to a running ComfyUI over HTTP and its websocket; runs in ComfyUI's Python, not in ours.

    python http_driver.py URL < jobs.json > results.json

A job is `{"graph": API graph, "interrupt": bool}`. A result has the answer to `POST /prompt`
(`status`, `answer`), the `events` of that prompt alone (`[name, data, seconds]`), the number of
`previews`, `interrupted_after` (seconds from the request to the event) and the `history`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import uuid
from typing import Any

import aiohttp

_ENDS = ("execution_success", "execution_error", "execution_interrupted")
_PREVIEWS = (1, 4)  # types of binary messages


async def run_job(session: aiohttp.ClientSession, url: str, job: dict[str, Any]) -> dict[str, Any]:
    """Queue a graph and listen until it has ended."""
    client = uuid.uuid4().hex
    result: dict[str, Any] = {"events": [], "previews": 0}
    async with session.ws_connect(f"{url}/ws?clientId={client}", max_msg_size=0) as socket:
        flags = {"type": "feature_flags", "data": {"supports_preview_metadata": True}}
        await socket.send_str(json.dumps(flags))
        body = {"prompt": job["graph"], "client_id": client}
        async with session.post(f"{url}/prompt", json=body) as reply:
            result |= {"status": reply.status, "answer": await reply.json()}
        if result["status"] != 200:
            return result
        own, began, asked = result["answer"]["prompt_id"], time.monotonic(), None
        async for message in socket:
            if message.type == aiohttp.WSMsgType.BINARY:
                kind = int.from_bytes(message.data[:4], "big")
                result["previews"] += kind in _PREVIEWS
                continue
            said = json.loads(message.data)
            name, data = said["type"], said.get("data") or {}
            if data.get("prompt_id") != own:  # of an earlier one, or of the server
                continue
            result["events"].append([name, data, time.monotonic() - began])
            if job.get("interrupt") and asked is None and _has_begun(name, data):
                asked = time.monotonic()
                async with session.post(f"{url}/interrupt", json={}) as reply:
                    assert reply.status == 200
            if name in _ENDS:
                if asked is not None:
                    result["interrupted_after"] = time.monotonic() - asked
                break
    for _ in range(100):  # it is written a moment after the last event
        async with session.get(f"{url}/history/{own}") as reply:
            result["history"] = (await reply.json()).get(own)
        if result["history"] is not None:
            break
        await asyncio.sleep(0.1)
    return result


def _has_begun(name: str, data: dict[str, Any]) -> bool:
    """Whether a node reported progress that is not its beginning or its end."""
    states = data.get("nodes", {}).values() if name == "progress_state" else ()
    return any(0 < state["value"] < state["max"] for state in states)


async def main() -> None:
    """All jobs, one after the other; also what `/object_info` and the templates are."""
    url = sys.argv[1]
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        async with session.get(f"{url}/object_info") as reply:
            info = await reply.json()
        async with session.get(f"{url}/workflow_templates") as reply:
            templates = await reply.json()
        results = [await run_job(session, url, job) for job in json.load(sys.stdin)]
    ours = {name: node for name, node in info.items() if name.startswith("MMAccel")}
    print(json.dumps({"object_info": ours, "templates": templates, "jobs": results}))


if __name__ == "__main__":
    asyncio.run(main())
