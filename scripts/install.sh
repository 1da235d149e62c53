#!/usr/bin/env bash
# Installs jaxtrain and what it needs into .venv, once, and runs nothing: scripts/install.sh. scripts/train.sh does the same before it trains.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
prepare_env requirements.txt
echo "installed: $root/.venv/bin/jaxtrain, and \`import jaxtrain\` in $python"
