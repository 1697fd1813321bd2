#!/usr/bin/env bash
# Runs a plan on all nodes of a SLURM job:
#
#     sbatch --nodes 4 --gpus-per-node 8 examples/ray_slurm.sh PLAN.yaml DIR [options of kfacpack run]
#
# The first node of the job is the head of a Ray cluster, and the command runs there. If the job ends before the run
# does, submit it again with the same folder: the run continues.
#SBATCH --ntasks-per-node 1
#SBATCH --exclusive
set -euo pipefail
plan=$1 output=$2
shift 2

port=${RAY_PORT:-6379}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes 1 --ntasks 1 --nodelist "$head" hostname --ip-address | awk '{print $1}'):$port
export RAY_USAGE_STATS_ENABLED=0
# Only the resources of the job: without these options, Ray counts all cores of a node.
resources=(--num-cpus "${SLURM_CPUS_ON_NODE:-1}" ${SLURM_GPUS_ON_NODE:+--num-gpus "$SLURM_GPUS_ON_NODE"})

srun --nodes 1 --ntasks 1 --nodelist "$head" \
    ray start --head --port "$port" --include-dashboard false "${resources[@]}" --block &
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
until ray health-check --address "$address" 2>/dev/null; do sleep 1; done
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    srun --nodes $((SLURM_JOB_NUM_NODES - 1)) --ntasks $((SLURM_JOB_NUM_NODES - 1)) --exclude "$head" \
        ray start --address "$address" "${resources[@]}" --block &
fi
kfacpack run "$plan" -o "$output" --ray "$address" "$@"
