#!/usr/bin/env bash
# An S3-compatible server on this machine, until Ctrl-C: scripts/object_store.sh FOLDER [BUCKET].
#
# Installs SeaweedFS once into .venv-store (requirements-store.txt), keeps its data in FOLDER, makes BUCKET (jaxtrain), and prints the
# environment with which jaxtrain and other programs reach it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
[[ $# -ge 1 ]] || stop "scripts/object_store.sh needs a folder for its data: scripts/object_store.sh FOLDER [BUCKET]"
prepare_env requirements.txt requirements-dev.txt
prepare_folder .venv-store requirements-store.txt
exec "$python" "$root/tests/support/object_store.py" "$@"
