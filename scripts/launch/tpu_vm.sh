#!/usr/bin/env bash
# TPU VMs without Kubernetes: the same command on every host of a slice; jax asks the machines for their addresses, and nothing is passed.
# (https://docs.cloud.google.com/tpu/docs/jax-pods)
#
#   TPU=my-slice ZONE=us-east5-a bash scripts/launch/tpu_vm.sh --config=llama3_8b --workdir=/shared/runs/llama \
#       --config.data.source=/shared/data/text --config.data.tokenizer=/shared/data/tokenizer.json
#
# FOLDER is the repository on the hosts (jaxtrain, below the home folder); --workdir is a folder that all of them share. gcloud does not pass
# the status of a host's command on, so nothing is started again here: the same command goes on. Not rehearsed: it takes TPUs.
set -euo pipefail
command=$(printf '%q ' env JAXTRAIN_EXTRAS=tpu scripts/train.sh "$@")
exec gcloud compute tpus tpu-vm ssh "${TPU:?is the name of the slice}" --zone="${ZONE:?is its zone}" --worker=all \
    --command="cd ${FOLDER:-jaxtrain} && $command"
