#!/bin/bash
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive

# Trains on all nodes of the job but the last, which sums.
#
#     sbatch examples/slurm.sh examples/digits.py --epochs 20
#
# The ranks wait until `fanin switch` is there, and it ends with them. fanin and the program must be
# on all nodes, in one place. `sbatch --nodes=N` changes the number of nodes. RANKS (1) is how many
# ranks a node starts; SWITCH_PORT (4800) and RENDEZVOUS_PORT (29500) must be free.
set -euo pipefail

stop() {
    echo "slurm.sh: $1" >&2
    exit 2
}

[ $# -gt 0 ] || stop "name a program: sbatch slurm.sh train.py [its arguments]"
[ -n "${SLURM_JOB_NODELIST:-}" ] || stop "this is no job of Slurm; start it by: sbatch slurm.sh $*"
[ "$SLURM_NNODES" -ge 2 ] \
    || stop "the job has one node, and the last one only sums; start it by: sbatch --nodes=2 ..."
[ -f "$1" ] || stop "there is no program $1 in $PWD"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
switch=${nodes[-1]}
training=$((SLURM_NNODES - 1))
port=${SWITCH_PORT:-4800}
export FANIN_SWITCH=$switch:$port

srun --nodes=1 --ntasks=1 --nodelist="$switch" fanin switch --listen "0.0.0.0:$port" &
summing=$!
srun --nodes="$training" --ntasks="$training" --exclude="$switch" \
    torchrun --nnodes "$training" --nproc-per-node "${RANKS:-1}" \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d \
    --rdzv-endpoint "${nodes[0]}:${RENDEZVOUS_PORT:-29500}" "$@" &
ranks=$!

# The ranks would wait half an hour for a switch that cannot start.
status=0
wait -n "$summing" "$ranks" || status=$?
if ! kill -0 "$summing" 2>/dev/null; then
    echo "slurm.sh: the switch on $switch ended with status $status; its message is above" >&2
    kill "$ranks" 2>/dev/null || true
    wait "$ranks" || true
    exit 1
fi
kill "$summing"
wait "$summing" || true
exit "$status"
