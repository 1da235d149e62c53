# Sourced by train.sh and test.sh: makes .venv once and sets `python` to its interpreter.
#
#   prepare_env requirements.txt …     installs these files into .venv, unless a stamp says that this has been done
#   prepare_folder FOLDER FILE         installs a file's packages alone into a folder beside .venv, unless its stamp says so
#
# A stamp in .venv holds the Python version and a hash of the files. Interrupted, the next call starts the environment again (downloads
# stay in pip's cache). Two calls at a time wait for each other. Environment variables: PYTHON, the interpreter to start from (python3);
# JAXTRAIN_EXTRAS, what the accelerator needs: cuda13 or tpu, by a requirements file of that name; it is remembered.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python="$root/.venv/bin/python"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

stop() {
    echo "error: $*" >&2
    exit 2
}

prepare_env() {
    local base=${PYTHON:-python3} version files=() name
    command -v "$base" >/dev/null || stop "$base is not there: install Python 3.11, 3.12 or 3.13, or set PYTHON=/path/to/python"
    version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || stop "$base does not run"
    case $version in
        3.11 | 3.12 | 3.13) ;;
        *) stop "$base is Python $version: use 3.11, 3.12 or 3.13, by PYTHON=/path/to/python $0" ;;
    esac
    for name in "$@"; do files+=("$root/$name"); done
    mkdir -p "$root/.cache"
    # The lock is held by this subshell alone: the program that runs afterwards must not keep it.
    (
        if command -v flock >/dev/null; then
            flock -n 9 || { echo "waiting for another call to prepare .venv" >&2 && flock 9; }
        fi
        install_once "$base" "$version" "${*: -1}" "${files[@]}"
    ) 9>"$root/.cache/venv.lock"
}

# install_once PYTHON VERSION STAMP FILE… : the stamp is named after the last requirements file.
install_once() {
    local base=$1 version=$2 stamp="$root/.venv/.installed-$3" busy="$root/.venv/.installing" extras wanted file arguments=()
    shift 3
    extras=${JAXTRAIN_EXTRAS-$(cat "$root/.venv/.extras" 2>/dev/null || true)}
    if [[ -n $extras ]]; then
        [[ -f $root/requirements-$extras.txt ]] || stop "JAXTRAIN_EXTRAS=$extras is not known: use JAXTRAIN_EXTRAS=cuda13 or JAXTRAIN_EXTRAS=tpu"
        set -- "$@" "$root/requirements-$extras.txt"
    fi
    wanted="$version $extras $(cat "$@" | "$base" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
    if [[ -x $python && $(cat "$stamp" 2>/dev/null) == "$wanted" ]]; then return; fi

    "$base" -c 'import ensurepip, venv' 2>/dev/null || stop "$base has no venv module: install it (Debian, Ubuntu: apt install python$version-venv)"
    if [[ -e $busy || ! -e $root/.venv/.python || $(cat "$root/.venv/.python") != "$version" ]] || ! "$python" -c 'import pip' 2>/dev/null; then
        echo "making .venv with Python $version" >&2
        rm -rf "$root/.venv"
        "$base" -m venv "$root/.venv" || stop "$base -m venv failed"
        echo "$version" >"$root/.venv/.python"
    fi
    for file in "$@"; do arguments+=(-r "$file"); done
    echo "installing $(for file in "$@"; do printf '%s ' "$(basename "$file")"; done)into .venv (once)" >&2
    touch "$busy"
    "$python" -m pip install --quiet --disable-pip-version-check "${arguments[@]}" || stop "pip could not install: see above; the next call tries again"
    echo "$extras" >"$root/.venv/.extras"
    echo "$wanted" >"$stamp"
    rm -f "$busy"
}

prepare_folder() {
    local folder="$root/$1" file="$root/$2" wanted
    wanted="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') $(cat "$file")"
    if [[ $(cat "$folder/.installed" 2>/dev/null) == "$wanted" ]]; then return; fi
    echo "installing $2 into $1 (once)" >&2
    rm -rf "$folder"
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" -r "$file" ||
        stop "pip could not install: see above; the next call tries again"
    echo "$wanted" >"$folder/.installed"
}
