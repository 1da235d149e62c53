#!/usr/bin/env bash
# Lint, format, types and tests: scripts/test.sh [--full [--part=K/N]] [arguments of pytest].
#
# --full adds the tests that take long, and installs the compilers, the object store, transformers, the owners of formats of data and the trackers,
# which some of them need; --part=2/4 runs the second of four parts.
# There are as many workers as cores; JAXTRAIN_TEST_WORKERS says otherwise.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
prepare_env requirements.txt requirements/dev.txt
if [[ " $* " == *" --full "* ]]; then
    prepare_folder .venv-compilers requirements/compilers.txt
    prepare_folder .venv-store requirements/store.txt
    prepare_folder .venv-transformers requirements/transformers.txt
    prepare_folder .venv-formats requirements/formats.txt
    prepare_folder .venv-trackers requirements/trackers.txt
fi
cd "$root"
# Test files and the package are compiled once, not by each worker and each command of a test.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$root/.cache/pycache"
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
workers=${JAXTRAIN_TEST_WORKERS:-$(cores)}
exec "$python" -m pytest -n "$workers" --dist=loadgroup --no-loadscope-reorder "$@"
