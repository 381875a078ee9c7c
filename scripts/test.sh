#!/usr/bin/env bash
# Everything that needs no GPU: style, types, tests. Makes .venv where there is none.
#   PYTHON=python3.12 TRANSFORMERS=5.17.0 bash scripts/test.sh [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment
install ".[test]"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
bash scripts/types.sh .venv/bin/mypy
.venv/bin/python -m pytest "$@"
