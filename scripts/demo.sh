#!/usr/bin/env bash
# Makes the environment .venv (the first time) and optimizes a real function in it: scripts/demo.py. No GPU needed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh

python=$(first_python python3.11 'sys.version_info[:2] == (3, 11)' || first_python python3 'sys.version_info >= (3, 11)') || {
    echo "no Python >= 3.11 with venv found; set PYTHON to one" >&2
    exit 2
}
make_environment .venv "$python" ""
exec .venv/bin/python scripts/demo.py "$@"
