#!/bin/bash
# A run on nodes of Slurm: sbatch launch/slurm.sh recipe.toml 'placement.pools={main=[8,8]}'
#
# The job is queued again, and continues, after a lost node or worker and before its time limit.
#SBATCH --job-name=hybridflow
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@900
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=hybridflow-%j.log

# Change here what your cluster needs: modules, the environment with hybridflow, caches.
# source /path/to/venv/bin/activate

if [ $# -eq 0 ]; then
    echo "usage: sbatch launch/slurm.sh recipe.toml [section.key=value ...]" >&2
    exit 2
fi
export RAY_AUTH_MODE=token # `ray get-auth-token --generate`, once; ~/.ray/auth_token is on every node
export RAY_worker_niceness=0
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address="$head:$((20000 + SLURM_JOB_ID % 10000))"
pid_file=$(mktemp)
stopped=

# SIGTERM comes 900 s before the time limit (more for longer steps: sbatch --signal=B:TERM@SECONDS), and at preemption.
# This script runs on the first node, as the run does.
# shellcheck disable=SC2016
train='echo $$ > "$0"; exec hybridflow train "$@" controller.backend=ray controller.address=auto'
trap 'stopped=1; kill -TERM "$(cat "$pid_file")" 2> /dev/null || kill -TERM "$step"' TERM
srun --kill-on-bad-exit=0 --cpu-bind=none ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" -- \
    bash -c "$train" "$pid_file" "$@" &
step=$!
while true; do
    wait "$step"
    status=$?
    kill -0 "$step" 2> /dev/null || break # otherwise the signal has ended the wait
done
if [ "$status$stopped" = 0 ] && [ ! -s "$pid_file" ]; then
    echo "error: Ray did not start on $head, see above; is another cluster running on it, or port ${address#*:} in use?" >&2
    status=1
fi
rm -f "$pid_file"

# 75: a worker or a node was lost, or no space was left. After a signal, 0: the run has saved; 130: it had not begun.
case "$status$stopped" in
    75* | 01 | 1301 | 1431) scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$status"
