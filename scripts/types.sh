#!/usr/bin/env bash
# Checks types as the package is installed, the four folders inside mmaccel, and of the code that
# trains the embedded models and measures on GPUs.
#   bash scripts/types.sh [mypy]
set -euo pipefail
cd "$(dirname "$0")/.."
mypy=$(realpath -s "${1:-.venv/bin/mypy}")
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir "$tree/mmaccel"
ln -s "$PWD"/mmaccel/* "$PWD"/{kernels,samplers,pipelines,tokenizers_vq} "$tree/mmaccel/"
ln -s "$PWD"/{benchmarks,scripts} "$tree/"
config="$PWD/pyproject.toml"
cd "$tree" && "$mypy" --config-file "$config" --cache-dir "$tree/.cache" -p mmaccel -p benchmarks.gpu -m benchmarks.report -p scripts.training
