#!/usr/bin/env bash
# An S3-compatible server on this machine, until Ctrl-C: tests/support/object_store.sh FOLDER [BUCKET].
#
# Installs SeaweedFS once into .venv-store (requirements/store.txt), keeps its data in FOLDER, makes BUCKET (jaxtrain), and prints the
# environment with which jaxtrain and other programs reach it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/_env.sh"
[[ $# -ge 1 ]] || stop "tests/support/object_store.sh needs a folder for its data: tests/support/object_store.sh FOLDER [BUCKET]"
prepare_env requirements.txt requirements/dev.txt
prepare_folder .venv-store requirements/store.txt
exec "$python" "$root/tests/support/object_store.py" "$@"
