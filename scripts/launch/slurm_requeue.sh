# Sourced by slurm.sbatch and slurm_pyxis.sbatch: runs the training step, and requeues the job where its end says that it can go on.
#
#   run_and_requeue SRUN_OPTION… -- COMMAND…     ends the batch script with the status that ended the step
#
# Slurm's own --requeue covers a node's failure and a preemption, and no exit status: that takes `scontrol requeue`
# (https://slurm.schedmd.com/sbatch.html#OPT_requeue). srun gives the highest status of its tasks
# (https://slurm.schedmd.com/srun.html), and that may be a consequence: where one task ends with 2 (bad config), another that
# is killed afterwards has 137. So each task leaves its status and the time of its end in a folder that all hosts share.

MAX_RESTARTS=${MAX_RESTARTS:-20} # a stop on request (75) is not bounded by it: it has saved a step

# a task of an array by its own name: the first one's number is that of the array, too (https://slurm.schedmd.com/job_array.html)
JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
JOB=${JOB:-${SLURM_JOB_ID:-}}

run_and_requeue() {
    local options=() step status
    while [[ $1 != -- ]]; do options+=("$1") && shift; done
    shift
    statuses=$(mktemp -d "$SLURM_SUBMIT_DIR/.statuses-$SLURM_JOB_ID.XXXXXX")
    # A signal to the step reaches this shell too; it waits for the command, which has its own way to stop. --wait is for tasks that find
    # no end by themselves after another's.
    srun --kill-on-bad-exit=0 --wait=600 "${options[@]}" bash -c '
        trap : TERM INT
        "$@"
        status=$?
        echo "$(date +%s%N) $status $SLURM_PROCID $(hostname)" >"$0/$SLURM_PROCID"
        exit "$status"' "$statuses" "$@" &
    step=$!
    # By --signal=B:TERM@…, before the time limit. Not through srun, which would kill the tasks seconds later (seen with 22.05).
    trap 'scancel --signal=TERM "$JOB"' TERM
    while kill -0 "$step" 2>/dev/null; do wait "$step"; done
    wait "$step"
    status=$(first_cause "$?")
    rm -r "$statuses"
    if goes_on "$status"; then requeue "$status"; fi
    exit "$status"
}

# first_cause STATUS_OF_SRUN: a verdict about the run (bad config, bad data, bad numbers, no memory, Ctrl-C) wherever there is one, else the status of the
# task that ended first with another than 0, else srun's.
first_cause() {
    cat "$statuses"/* 2>/dev/null | sort -n | awk -v srun="$1" '
        $2 ~ /^(2|65|81|82|130)$/ && !verdict { verdict = $2 }
        $2 != 0 && !first { first = $2 }
        END { print verdict ? verdict : first ? first : srun }'
}

# goes_on STATUS: as ExitStatus.goes_on; and for a death by a signal, 128 and its number, but for Ctrl-C's.
goes_on() {
    [[ $1 =~ ^(74|75|79|80)$ ]] || (($1 > 128 && $1 != 130))
}

# requeue STATUS: unless the job was cancelled, or has been started too often.
requeue() {
    local state restarts=${SLURM_RESTART_COUNT:-0}
    state=$(squeue --noheader --jobs="$JOB" --format=%T)
    if [[ $state != RUNNING ]]; then
        echo "status $1: not requeued, since the job is $state"
    elif (($1 != 75 && restarts >= MAX_RESTARTS)); then
        echo "status $1: not requeued, since there were MAX_RESTARTS=$MAX_RESTARTS restarts"
    else
        echo "status $1: requeued, restart $((restarts + 1))"
        scontrol requeue "$JOB"
    fi
}
