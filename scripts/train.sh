#!/usr/bin/env bash
# Trains: scripts/train.sh [flags of jaxtrain.train]. Without flags: configs/tiny.py into runs/tiny. All flags: scripts/train.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
prepare_env requirements.txt
# Huge pages for what glibc allocates: on simulated devices a step touches its temporary memory afresh (docs/log.md).
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
exec "$python" -m jaxtrain.train "$@"
