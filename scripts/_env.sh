# Sourced by the other scripts: makes .venv once and sets `python` to its interpreter.
#
#   prepare_env requirements.txt …     installs these files, and jaxtrain itself (editable), into .venv, unless stamps say that it is done
#   prepare_folder FOLDER FILE         installs a file's packages alone into a folder beside .venv, unless its stamp says so
#
# uv does it where it is there, and pip where it is not, or where uv cannot. A stamp in .venv holds the Python version and the files. Where all
# is done nothing is written: the checkout may be read-only. Interrupted, the next call starts the environment again (downloads stay in the
# cache). Two calls at a time wait for each other.
# Environment variables: PYTHON, the interpreter to start from (python3); JAXTRAIN_EXTRAS, what the accelerator needs: cuda13 or tpu, a file
# of requirements/; it is remembered.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python="$root/.venv/bin/python"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# every package of a run, and what builds jaxtrain, with its version
PINNED=("$root/requirements.txt" "$root/requirements/indirect.txt" "$root/requirements/build.txt")
AGAIN="could not install: see above; the next call tries again"

stop() {
    echo "error: $*" >&2
    exit 2
}

cores() {
    nproc 2>/dev/null || getconf _NPROCESSORS_ONLN
}

has_uv() {
    uv --version >/dev/null 2>&1
}

# with_uv ARGUMENT… : `uv ARGUMENT…`. Its status is not 0 where there is no uv, or it fails, as behind an index that pip alone knows of.
with_uv() {
    has_uv || return 1
    uv "$@" || { echo "uv could not: trying pip" >&2 && return 1; }
}

prepare_env() {
    local base=${PYTHON:-python3} version files=() name extras pinned wanted package wanted_files
    command -v "$base" >/dev/null || stop "$base is not there: install Python 3.11, 3.12 or 3.13, or set PYTHON=/path/to/python"
    version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || stop "$base does not run"
    case $version in
        3.11 | 3.12 | 3.13) ;;
        *) stop "$base is Python $version: use 3.11, 3.12 or 3.13, by PYTHON=/path/to/python $0" ;;
    esac
    for name in "$@"; do files+=("$root/$name"); done
    if is_installed "$version" "${*: -1}" "${files[@]}"; then return; fi
    mkdir -p "$root/.cache"
    # The lock is held by this subshell alone: the program that runs afterwards must not keep it.
    (
        if command -v flock >/dev/null; then
            flock -n 9 || { echo "waiting for another call to prepare .venv" >&2 && flock 9; }
        fi
        install_once "$base" "$version" "${*: -1}" "${files[@]}"
    ) 9>"$root/.cache/venv.lock"
}

# is_installed VERSION STAMP FILE… : whether the stamps say so. It also sets what a complete installation has in them, and `wanted_files`, the
# files with that of the accelerator. A .venv that is a link is another checkout's, and has that one's package.
is_installed() {
    local version=$1 stamp="$root/.venv/.installed-${2//\//-}"
    shift 2
    extras=${JAXTRAIN_EXTRAS-$(cat "$root/.venv/.extras" 2>/dev/null || true)}
    if [[ -n $extras ]]; then
        [[ -f $root/requirements/$extras.txt ]] || stop "JAXTRAIN_EXTRAS=$extras is not known: use JAXTRAIN_EXTRAS=cuda13 or JAXTRAIN_EXTRAS=tpu"
        set -- "$@" "$root/requirements/$extras.txt"
    fi
    wanted_files=("$@") pinned="$version $(cat "${PINNED[@]}")" wanted="$version $extras $(cat "$@")"
    package="$version $root $(cat "$root/pyproject.toml" "$root/jaxtrain/__init__.py")"
    [[ -x $python && $(cat "$root/.venv/.installed-pinned" 2>/dev/null) == "$pinned" ]] || return 1
    [[ -L $root/.venv || $(cat "$root/.venv/.installed-package" 2>/dev/null) == "$package" ]] || return 1
    [[ $# == 1 || $(cat "$stamp" 2>/dev/null) == "$wanted" ]]
}

# install_once PYTHON VERSION STAMP FILE… : first the pinned packages and the package itself; then, of several files, whatever the others
# need. The last stamp is named after the last file, with - for /.
install_once() {
    local base=$1 version=$2 stamp="$root/.venv/.installed-${3//\//-}" pinned_stamp="$root/.venv/.installed-pinned" busy="$root/.venv/.installing"
    local package_stamp="$root/.venv/.installed-package" extras pinned wanted package wanted_files said file arguments=()
    if is_installed "${@:2}"; then return; fi

    if [[ -e $busy || ! -e $root/.venv/.python || $(cat "$root/.venv/.python") != "$version" ]] || ! "$python" -c 'import pip' 2>/dev/null; then
        make_venv "$base" "$version"
    fi
    touch "$busy"
    if [[ $(cat "$pinned_stamp" 2>/dev/null) != "$pinned" ]]; then
        echo "installing requirements.txt into .venv (once)" >&2
        install_pinned "$base"
        echo "$pinned" >"$pinned_stamp"
    fi
    if [[ ! -L $root/.venv && $(cat "$package_stamp" 2>/dev/null) != "$package" ]]; then
        # The setuptools that is pinned builds it: nothing is downloaded. It warns of what any editable installation is.
        said=$(install_packages --no-deps --no-build-isolation -e "$root" 2>&1) || { echo "$said" >&2 && exit 2; }
        echo "$package" >"$package_stamp"
    fi
    if ((${#wanted_files[@]} > 1)); then
        for file in "${wanted_files[@]}"; do arguments+=(-r "$file"); done
        echo "installing $(for file in "${wanted_files[@]}"; do printf '%s ' "${file#"$root/"}"; done)into .venv (once)" >&2
        install_packages "${arguments[@]}"
        echo "$wanted" >"$stamp"
    fi
    echo "$extras" >"$root/.venv/.extras"
    rm -f "$busy"
}

# make_venv PYTHON VERSION : an empty .venv. Where PYTHON's pip can install into it, it has no pip of its own yet: to get one takes 3 seconds.
make_venv() {
    if ! has_uv && ! "$1" -c 'import ensurepip, venv' 2>/dev/null; then
        stop "$1 has no venv module: install it (Debian, Ubuntu: apt install python$2-venv)"
    fi
    echo "making .venv with Python $2" >&2
    rm -rf "$root/.venv"
    if ! with_uv venv --quiet --seed --python "$(command -v "$1")" "$root/.venv"; then
        rm -rf "$root/.venv"
        "$1" -m venv --without-pip "$root/.venv" || stop "$1 -m venv failed"
        "$1" -m pip --python "$python" --version >/dev/null 2>&1 || "$python" -m ensurepip --default-pip >/dev/null || stop "$1 -m ensurepip failed"
    fi
    echo "$2" >"$root/.venv/.python"
}

# install_packages ARGUMENT… : as `pip install ARGUMENT…` for .venv. Modules are compiled when they are first imported: few of them are.
install_packages() {
    if with_uv pip install --quiet --python "$python" "$@"; then return; fi
    "$python" -m pip install --quiet --disable-pip-version-check --no-compile "$@" || stop "pip $AGAIN"
}

# install_pinned PYTHON : all pinned packages, and pip where there is none. A pip works on one package at a time, on one core, so there are
# several at once; nothing is looked up that packages need, for that is pinned, too.
install_pinned() {
    local packages part pip=("$python" -m pip) pips=() i j count failed="" file arguments=()
    for file in "${PINNED[@]}"; do arguments+=(-r "$file"); done
    if with_uv pip install --quiet --python "$python" "${arguments[@]}"; then return; fi
    mapfile -t packages < <(sed 's/ *#.*//; /^$/d' "${PINNED[@]}")
    if ! "$python" -c 'import pip' 2>/dev/null; then
        pip=("$1" -m pip --python "$python") packages+=(pip)
    fi
    count=$(($(cores) < 4 ? $(cores) : 4))
    for ((i = 0; i < count; i++)); do
        part=()
        for ((j = i; j < ${#packages[@]}; j += count)); do part+=("${packages[j]}"); done
        "${pip[@]}" install --quiet --disable-pip-version-check --no-compile --no-deps "${part[@]}" &
        pips+=($!)
    done
    for i in "${pips[@]}"; do wait "$i" || failed=yes; done
    [[ -z $failed ]] || stop "pip $AGAIN"
}

prepare_folder() {
    local folder="$root/$1" file="$root/$2" wanted
    wanted="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') $(cat "$file")"
    if [[ $(cat "$folder/.installed" 2>/dev/null) == "$wanted" ]]; then return; fi
    echo "installing $2 into $1 (once)" >&2
    rm -rf "$folder"
    install_packages --no-deps --target "$folder" -r "$file"
    echo "$wanted" >"$folder/.installed"
}
