#!/usr/bin/env bash
# Everything that CI runs: lint, types, tests, the scoreboard, the demo; then a shorter round on the newest JAX where
# there is a Python 3.12. Needs a Python >= 3.11 and the network once. All steps run; any failure fails the whole.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh

failed=()
summary=()

# step NAME COMMAND...: runs it, remembers how long it took and whether it failed.
step() {
    local name=$1 start=$SECONDS verdict=ok
    shift
    printf '\n=== %s\n' "$name"
    if ! "$@"; then
        verdict=FAILED
        failed+=("$name")
    fi
    summary+=("$(printf '%5d s  %-6s  %s' $((SECONDS - start)) "$verdict" "$name")")
}

# A kernel that does not build is an error here, where users get a warning and plain JAX.
export HLOFUSE_STRICT=1
# A cache of the check's own: what users (or an earlier check) built must not hide a kernel that no longer builds.
HLOFUSE_CACHE_DIR=$(mktemp -d)
export HLOFUSE_CACHE_DIR
trap 'rm -rf "$HLOFUSE_CACHE_DIR"' EXIT

python=$(first_python python3.11 'sys.version_info[:2] == (3, 11)' || first_python python3 'sys.version_info >= (3, 11)') || {
    echo "no Python >= 3.11 with venv found; set PYTHON to one" >&2
    exit 2
}
step "environment (.venv)" make_environment .venv "$python" test
if [ ${#failed[@]} -gt 0 ]; then
    exit 1
fi
bin=.venv/bin

step "ruff" "$bin/ruff" check --output-format concise .
step "mypy" "$bin/mypy"
step "pytest" "$bin/python" -m pytest -q -n 2 --durations 15
step "scoreboard" "$bin/python" scripts/scoreboard.py --check --size small --jobs 2
if [ -f scripts/calibrate.py ]; then
    step "register estimate against ptxas" "$bin/python" scripts/calibrate.py --random 100
fi
step "demo" bash scripts/demo.sh --quick

# What depends on JAX's versions: the front end, the primitive, what runs in JAX's runtime.
newest_tests=()
for file in tests/test_{api,transformations,import,xla_runtime,shim}.py; do
    if [ -f "$file" ]; then
        newest_tests+=("$file")
    fi
done

if newest=$(first_python python3.12 'sys.version_info[:2] == (3, 12)'); then
    step "environment (.venv312)" make_environment .venv312 "$newest" test
    step "pytest on the newest JAX" .venv312/bin/python -m pytest -q -n 2 -m "not slow" "${newest_tests[@]}"
    step "scoreboard on the newest JAX" .venv312/bin/python scripts/scoreboard.py --check --size small --jobs 2
else
    echo "no Python 3.12 here: the round on the newest JAX is left out"
fi

printf '\n'
printf '%s\n' "${summary[@]}"
if [ ${#failed[@]} -gt 0 ]; then
    printf '\nFAILED: %s\n' "$(IFS=,; echo "${failed[*]}")"
    exit 1
fi
