#!/usr/bin/env bash
# Lint, format, types and tests: scripts/test.sh [--full] [arguments of pytest]. --full adds the tests that take long.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
prepare_env requirements.txt requirements-dev.txt
cd "$root"
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
exec "$python" -m pytest -n "${JAXTRAIN_TEST_WORKERS:-2}" --dist=loadgroup "$@"
