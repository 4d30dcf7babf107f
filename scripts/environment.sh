# shellcheck shell=bash
# Sourced by check.sh and demo.sh: finds a Python and makes a virtual environment with this project in it, once.

# first_python NAME CONDITION: the first interpreter that starts, can make environments and fulfils the condition.
# Every candidate is started, because a version manager's shims stand on the PATH for versions that are not there.
first_python() {
    local name=$1 condition=$2 candidate
    for candidate in ${PYTHON:+"$PYTHON"} "$name" python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3 \
        "$HOME"/.local/share/uv/python/*/bin/python3 /opt/python*/bin/python3 /usr/local/bin/python3 /usr/bin/python3; do
        if "$candidate" -c "import ensurepip, sys, venv; sys.exit(not ($condition))" 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return 0
        fi
    done
    return 1
}

# make_environment FOLDER PYTHON EXTRA: `pip install -e .[EXTRA]` in FOLDER, unless that is already so. A stamp says
# what was installed from; an environment with the extra `test` serves those who ask for none.
make_environment() {
    local folder=$1 python=$2 extra=$3 maker state stamp
    maker="$PWD $("$python" -VV)"
    state="$maker $(cat setup.cfg pyproject.toml | cksum)"
    if "$folder/bin/python" -c '' 2>/dev/null; then
        for stamp in "$folder/installed-$extra" "$folder/installed-${extra:-test}"; do
            if [ "$(cat "$stamp" 2>/dev/null)" = "$state" ]; then
                return 0
            fi
        done
    fi
    echo "making $folder with $("$python" -V): downloads some 200 MB the first time"
    rm -f "$folder"/installed-*
    if [ "$(cat "$folder/made-by" 2>/dev/null)" != "$maker" ]; then
        "$python" -m venv --clear "$folder" && echo "$maker" >"$folder/made-by" || return 1
    fi
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
        --editable ".${extra:+[$extra]}" || return 1
    echo "$state" >"$folder/installed-$extra"
}
