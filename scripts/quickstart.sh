#!/usr/bin/env bash
# From a fresh clone to an image: makes .venv, installs, generates token by token and accelerated.
#   PYTHON=python3.12 bash scripts/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
make_environment
install .
echo "Generating 8 images twice: token by token, and with Jacobi decoding."
.venv/bin/mmaccel generate --compare --out out
echo "Open the last file named above: both sides on one sheet."
