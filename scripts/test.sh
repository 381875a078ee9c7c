#!/usr/bin/env bash
# Everything that needs no GPU: style, types, tests. Makes .venv where there is none.
#   PYTHON=python3.12 TRANSFORMERS=5.17.0 bash scripts/test.sh [arguments of pytest]
# With arguments, only those tests; the kernels' two lanes run without any.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment
install ".[test]"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
bash scripts/types.sh .venv/bin/mypy
NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict --site-dir "$(mktemp -d)"
.venv/bin/python -m pytest "$@"
if [ $# -eq 0 ] && .venv/bin/python -c 'import triton' 2>/dev/null; then
    TRITON_INTERPRET=1 .venv/bin/python -m pytest -q tests/kernels/interpreted
    MMACCEL_COMPILE=1 .venv/bin/python -m pytest -q tests/kernels/compiled
fi
