#!/usr/bin/env bash
# What another release of a library breaks, on one page. It is installed beside the environment, which
# stays as it is.
#   bash scripts/try_release.sh transformers==5.25.0 [PYTEST ARGUMENTS]
# Without arguments: the fast tests of attach, of causal and vision-language models, and of exactness.
# WORKERS processes, by default one a core.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
if [ $# -eq 0 ]; then
    echo "try_release.sh: expected NAME==VERSION, such as transformers==5.25.0" >&2
    exit 2
fi
wanted=$1
shift
[ $# -gt 0 ] || set -- -m "not slow" $RELEASE_TESTS
make_environment
.venv/bin/python -c "import pytest" 2>/dev/null || install ".[test]"
folder=$(install_beside "$wanted")
report=$(mktemp)
trap 'rm -f "$report"' EXIT
PYTHONPATH="$folder" OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q --tb=no -rfE -p no:warnings \
    -n "${WORKERS:-auto}" --maxprocesses 8 --dist worksteal "$@" >"$report" || true
echo "$wanted: $(tail -n 1 "$report")"
failed=$(grep -E '^(FAILED|ERROR) ' "$report") || exit 0
echo "Failures by file:"
cut -d' ' -f2 <<<"$failed" | cut -d: -f1 | sort | uniq -c | sort -rn | head -n 20
echo "What they say:" # numbers left out, so that like ones are counted together
sed -E 's/^[^ ]+ [^ ]+( - )?//; s/[0-9]+/#/g' <<<"$failed" | cut -c1-160 | sort | uniq -c | sort -rn | head -n 20
exit 1
