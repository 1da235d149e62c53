#!/usr/bin/env bash
# Tries every command of README.md and docs/features.md: tests/by_hand/try_docs.sh [--part=K/N] [--list]. All flags: tests/by_hand/try_docs.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/_env.sh"
prepare_env requirements.txt
exec "$python" "$root/tests/by_hand/try_docs.py" "$@"
