# Sourced by quickstart.sh and test.sh. Reads PYTHON (default: the first Python >= 3.11 found) and
# TRANSFORMERS (a version of it; default: the newest).
_CPU_BUILDS=https://download.pytorch.org/whl/cpu

make_environment() {
    local python="${PYTHON:-}" candidate
    if [ -e .venv ]; then
        .venv/bin/python -m pip --version >/dev/null 2>&1 && return
        .venv/bin/python -m ensurepip >/dev/null 2>&1 && return
        echo ".venv: expected an environment with pip, received one without; remove .venv" >&2
        return 1
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        [ -n "$python" ] && break
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python="$candidate"
        fi
    done
    if [ -z "$python" ]; then
        echo "python: expected 3.11 or later, received none; install one or set PYTHON=/its/path" >&2
        return 1
    fi
    "$python" -m venv .venv
}

# install TARGET: one editable pip install. Without an NVIDIA GPU it must not bring CUDA packages: the
# bound on torch lets pip take a CPU build ("+cpu") from any index or folder that offers one. The
# options add PyTorch's own index of CPU builds where it answers.
install() {
    local options=(--quiet --disable-pip-version-check -e "$1")
    [ -z "${TRANSFORMERS:-}" ] || options+=("transformers==$TRANSFORMERS")
    if ! nvidia-smi >/dev/null 2>&1; then
        options+=("torch>=2.6,<2.14")
        if _answers "$_CPU_BUILDS/torch/"; then
            options+=(--extra-index-url "$_CPU_BUILDS")
        elif [ "$(uname -s)" = Linux ]; then
            echo "note: $_CPU_BUILDS does not answer. Should pip fetch nvidia-* packages, stop it," \
                "and set PIP_EXTRA_INDEX_URL to an index that offers CPU builds of torch." >&2
        fi
    fi
    .venv/bin/python -m pip install "${options[@]}"
}

# The tests that show whether another release of transformers is served.
RELEASE_TESTS="tests/attach tests/causal_lm tests/vision_language tests/exactness tests/matrix"
# The part of them that continuous integration runs with older releases.
OLDER_TESTS="tests/attach/test_models.py tests/attach/test_families.py tests/attach/test_own_prompts.py
    tests/attach/test_step_outputs.py tests/attach/test_generate.py tests/attach/test_fallback.py
    tests/causal_lm tests/vision_language/test_image_prompts.py
    tests/loading/test_transformers_release.py"

# install_beside NAME==VERSION: installs a release with what it needs into a folder of its own, for
# PYTHONPATH, and prints the folder. The environment's torch stays the one that is used.
install_beside() {
    local folder=".venv/beside/$1"
    if [ ! -e "$folder" ]; then
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --target "$folder.tmp" "$1" >&2
        mv "$folder.tmp" "$folder"
    fi
    echo "$PWD/$folder"
}

_answers() {
    .venv/bin/python -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)' "$1" \
        2>/dev/null
}
