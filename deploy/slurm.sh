#!/usr/bin/env bash
# A job of rlgraph on several hosts of SLURM:
#     sbatch --nodes=2 --gpus-per-node=8 deploy/slurm.sh recipes/one_step_off.py steps=100
# `ray symmetric-run` starts Ray on every host, runs the program on the first one, and ends Ray with it; its exit code is the job's.
#SBATCH --job-name=rlgraph
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
set -euo pipefail
[[ $# -gt 0 ]] || { echo "usage: sbatch --nodes=N deploy/slurm.sh PROGRAM.py [key=value...]" >&2; exit 2; }

# A token of this job alone, in the home that the hosts share. Ray refuses whoever does not know it.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=${RLGRAPH_TOKENS:-$HOME/.ray}/slurm-$SLURM_JOB_ID
mkdir -p "$(dirname "$RAY_AUTH_TOKEN_PATH")"
(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=${RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT:-300}
# Whoever uses the hosts before must have ended: `ray symmetric-run` ends all Ray of this user on them, hence --exclusive.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=0 \
    ray symmetric-run --address "$head:$port" --min-nodes "$SLURM_JOB_NUM_NODES" --disable-usage-stats \
    ${RLGRAPH_RAY_OPTIONS:-} -- python "$@"
