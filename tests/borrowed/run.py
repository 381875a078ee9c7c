"""Runs transformers' own generation tests with `Jacobi(window=8)` attached to every `generate`.

    TRANSFORMERS_TESTS=/path/to/transformers python tests/borrowed/run.py
    python tests/borrowed/run.py --checkout DIR --models all --json report.json

The tests lie in transformers' repository alone, not in what pip brings: a checkout of the installed
version is needed. They run in child processes against the installed transformers. See
`borrowed_plugin.py` for what happens at a call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# Decoder-only language models, and the tests of `generate` itself.
MODELS = (
    "arcee", "bloom", "codegen", "cohere", "cohere2", "ctrl", "dots1", "exaone4", "falcon", "gemma",
    "gemma2", "gemma3", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss",
    "gptj", "granite", "helium", "imagegpt", "llama", "ministral", "mistral", "mixtral", "mpt",
    "nemotron", "olmo", "olmo2", "olmo3", "openai", "opt", "persimmon", "phi", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2", "xglm",
)  # fmt: skip
_WORKERS = 2  # processes at a time
_BUDGET = 1800  # seconds of each
GENERATION = ("test_utils", "test_streamers")


def find_checkout(given: str | None = None) -> tuple[Path | None, str]:
    """The checkout, or None with the reason why there is none."""
    named = given or os.environ.get("TRANSFORMERS_TESTS")
    if not named:
        import transformers

        version = transformers.__version__
        return None, (
            "transformers' tests are not in its source distribution: set TRANSFORMERS_TESTS to a "
            f"checkout (git clone --depth 1 --branch v{version} "
            "https://github.com/huggingface/transformers)"
        )
    folder = Path(named).resolve()
    if not (folder / "tests/generation/test_utils.py").is_file():
        return None, f"{folder}: expected tests/generation/test_utils.py, received no such file"
    return folder, ""


def find_files(checkout: Path, models: Sequence[str]) -> list[str]:
    """Test files of these models, relative to the checkout; `["all"]` stands for every model."""
    tests = checkout / "tests"
    files = [tests / f"generation/{name}.py" for name in GENERATION]
    if list(models) == ["all"]:
        found = sorted(tests.glob("models/*/test_modeling_*.py"))
        files += [file for file in found if "GenerationTesterMixin" in file.read_text("utf-8")]
        files += [file for file in found if "CausalLMModelTest" in file.read_text("utf-8")]
    else:
        files += [tests / f"models/{name}/test_modeling_{name}.py" for name in models]
    return [str(file.relative_to(checkout)) for file in dict.fromkeys(files) if file.is_file()]


def run_tests(
    checkout: Path, tests: Iterable[str], *, plain: bool = False
) -> tuple[list[dict[str, Any]], str]:
    """Run files or single tests in one pytest process.

    Returns:
        What the plugin wrote, and why the process did not run to its end, or an empty text.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "calls.jsonl")
        out.touch()
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "MMACCEL_BORROWED": str(out),
            "MMACCEL_BORROWED_PLAIN": str(int(plain)),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(HERE), str(ROOT), os.environ.get("PYTHONPATH")))
            ),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-o", "log_cli=false"]
        command += ["-p", "borrowed_plugin", "-p", "no:cacheprovider"]
        command += ["--tb=line", "--continue-on-collection-errors", f"--basetemp={folder}/tests"]
        trouble = ""
        try:
            done = subprocess.run(
                [*command, *tests], cwd=checkout, env=environment, timeout=_BUDGET,
                start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True,
            )  # fmt: skip
            if done.returncode not in (0, 1, 5):
                trouble = f"pytest ended with {done.returncode}: {done.stdout[-2000:]}"
        except subprocess.TimeoutExpired:
            trouble = f"not finished in {_BUDGET} s"
        lines = out.read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines], trouble


def run_all(checkout: Path, models: Sequence[str] = MODELS) -> dict[str, Any]:
    """Run the tests of these models; the tests that failed run once more without a policy.

    Args:
        checkout: of transformers.
        models: names of folders in tests/models, or `["all"]`.

    Returns:
        The summary, see `summarize`.
    """
    import transformers

    began = time.perf_counter()
    files = find_files(checkout, models)
    with ThreadPoolExecutor(_WORKERS) as pool:
        shares = [files[start::_WORKERS] for start in range(_WORKERS)]
        answers = list(pool.map(lambda share: run_tests(checkout, share), shares))
    records = [record for lines, _ in answers for record in lines]
    troubles = [trouble for _, trouble in answers if trouble]
    troubles += [
        f"{r['test']}: not collected: {r['message']}"
        for r in records
        if r.get("result") == "failed" and "::" not in r["test"]
    ]
    failed = [r["test"] for r in records if r.get("result") == "failed" and "::" in r["test"]]
    again: list[dict[str, Any]] = []
    if failed:
        again, trouble = run_tests(checkout, failed, plain=True)
        troubles += [trouble] if trouble else []
    summary = summarize(records, again)
    head = {
        "transformers": transformers.__version__,
        "files": len(files),
        "seconds": round(time.perf_counter() - began),
        "troubles": troubles,
    }
    return head | summary


def summarize(records: list[dict[str, Any]], again: list[dict[str, Any]]) -> dict[str, Any]:
    """Count calls and tests.

    Args:
        records: lines of the plugin under the policy.
        again: lines of the tests that failed, run without it.

    Returns:
        tests: tests by result.
        calls: calls by kind, and by outcome within a kind.
        share: accelerated calls of text, of all that ran without an error.
        reasons: fallbacks of calls of text, by reason; a call may have several.
        differences: calls whose result was not the reference's.
        failures: tests that fail under the policy alone.
    """
    calls = [record for record in records if "call" in record]
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: Counter[str] = Counter()
    for call in calls:
        kinds[call["kind"]][call["outcome"]] += 1
        if call["kind"] == "text":
            reasons.update(call["reasons"])
    text = kinds["text"]
    counted = text["accelerated"] + text["fallback"]
    tests = [record for record in records if "test" in record]
    passed = {record["test"] for record in again if record.get("result") == "passed"}
    return {
        "tests": dict(Counter(test["result"] for test in tests)),
        "calls": {kind: dict(outcomes) for kind, outcomes in sorted(kinds.items())},
        "share": round(text["accelerated"] / counted, 4) if counted else 0.0,
        "reasons": dict(reasons.most_common()),
        "differences": [
            {"test": short(call["call"]), "difference": call["difference"]}
            for call in calls
            if call["difference"]
        ],
        "failures": [
            {"test": short(test["test"]), "message": test["message"]}
            for test in tests
            if test["result"] == "failed" and test["test"] in passed
        ],
    }


def short(test: str) -> str:
    """`llama::test_greedy_generate` for a test of a model, `test_utils::test_x` for another."""
    file, _, rest = test.partition("::")
    return f"{Path(file).stem.removeprefix('test_modeling_')}::{rest.rpartition('::')[2]}"


def main() -> int:
    """Print the summary; returns 1 for a difference or a failure, 2 without a checkout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkout", help="of transformers; by default TRANSFORMERS_TESTS")
    parser.add_argument("--models", default=",".join(MODELS), help="names, or all")
    parser.add_argument("--json", type=Path, help="write the summary to this file")
    options = parser.parse_args()
    checkout, reason = find_checkout(options.checkout)
    if checkout is None:
        print(reason, file=sys.stderr)
        return 2
    text = json.dumps(run_all(checkout, options.models.split(",")), indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    summary = json.loads(text)
    return int(bool(summary["differences"] or summary["failures"] or summary["troubles"]))


if __name__ == "__main__":
    sys.exit(main())
