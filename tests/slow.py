"""The tests marked `slow`, which only `bash scripts/test.sh --all` runs."""

SLOW: tuple[str, ...] = ()


def is_slow(nodeid: str) -> bool:
    return False
