#!/usr/bin/env bash
# A process a GPU on this node of a SkyPilot task: scripts/launch/process_per_gpu.sh COMMAND…
#
# jaxtrain reads JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID and JAX_LOCAL_DEVICE_IDS, which are set here from
# SKYPILOT_NODE_IPS, _NUM_NODES, _NODE_RANK and _NUM_GPUS_PER_NODE. SIGTERM reaches every process. The status is that of the process that ended
# first with another than 0, but a verdict about the run wherever there is one.
set -muo pipefail # -m: each process has a group of its own, which gets the signals
source "$(dirname "${BASH_SOURCE[0]}")/slurm_requeue.sh"
gpus=$SKYPILOT_NUM_GPUS_PER_NODE statuses=$(mktemp -d) pids=()
export JAX_COORDINATOR_ADDRESS="${SKYPILOT_NODE_IPS%%$'\n'*}:29500" JAX_NUM_PROCESSES=$((SKYPILOT_NUM_NODES * gpus))
for ((gpu = 0; gpu < gpus; gpu++)); do
    (
        trap : TERM INT # the command has its own way to stop, and is waited for
        JAX_PROCESS_ID=$((SKYPILOT_NODE_RANK * gpus + gpu)) JAX_LOCAL_DEVICE_IDS=$gpu "$@"
        code=$?
        echo "$(date +%s%N) $code $gpu" >"$statuses/$gpu"
    ) &
    pids+=($!)
done
trap 'for pid in "${pids[@]}"; do kill -TERM -- "-$pid" 2>/dev/null; done' TERM INT
for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
done
status=$(first_cause 0)
rm -r "$statuses"
exit "$status"
