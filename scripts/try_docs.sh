#!/usr/bin/env bash
# Tries every command of README.md and docs/features.md: scripts/try_docs.sh [--part=K/N] [--list]. All flags: scripts/try_docs.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
prepare_env requirements.txt
exec "$python" "$root/scripts/try_docs.py" "$@"
