#!/usr/bin/env bash
# Checks the types of the package as it is installed (the four folders at the top inside mmaccel), of
# scripts/training and of the GPU benchmarks.
#   bash scripts/types.sh [mypy]
set -euo pipefail
cd "$(dirname "$0")/.."
mypy=$(realpath -s "${1:-.venv/bin/mypy}")
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir "$tree/mmaccel"
ln -sfn "$PWD"/mmaccel/* "$PWD"/{kernels,samplers,pipelines,tokenizers_vq} "$tree/mmaccel/"
ln -sfn "$PWD"/{benchmarks,scripts} "$tree/"
config="$PWD/pyproject.toml"
cd "$tree" && "$mypy" --config-file "$config" --cache-dir "$tree/.cache" -p mmaccel -p benchmarks.gpu -m benchmarks.report -p scripts.training
