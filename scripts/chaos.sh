#!/usr/bin/env bash
# The long chaos run: real processes that are killed, stopped and starved while they train: scripts/chaos.sh [--kills=30] [--chaos_seed=0]
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/test.sh" --full tests/chaos --kills=30 "$@"
