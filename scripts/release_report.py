"""Tells on one page what failed in a run of the tests under another release of a library.

python scripts/release_report.py NAME==VERSION JUNIT.XML
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from xml.etree import ElementTree

SHOWN = 20  # most messages that are listed


def main(wanted: str, report: str) -> int:
    """Print the page; returns 1 if a test failed."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or _is_error(case)]
    print(f"\n{wanted}: {len(failed)} of {len(cases)} tests fail")
    per_file, named = Counter[str](), defaultdict[str, list[str]](list)
    for case in failed:
        path = case.attrib["classname"].replace(".", "/")
        per_file[path] += 1
        named[_message(case)].append(f"{path}.py::{case.attrib['name']}")
    for path, count in per_file.most_common(SHOWN):
        print(f"{count:6}  {path}.py")
    print("\nWhat they say, and the first test that says it:" if failed else "")
    for message, tests in sorted(named.items(), key=lambda item: -len(item[1]))[:SHOWN]:
        print(f"{len(tests):6}  {message}\n        {tests[0]}")
    return 1 if failed else 0


def _is_error(case: ElementTree.Element) -> bool:
    return case.find("error") is not None


def _message(case: ElementTree.Element) -> str:
    """The first line of a failure, with numbers left out so that like ones are counted together."""
    found = case.find("failure")
    found = case.find("error") if found is None else found
    assert found is not None
    lines = (found.attrib.get("message") or "no message").splitlines() or ["no message"]
    return re.sub(r"\d+", "#", lines[0])[:160]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
