#!/bin/bash
# One host's torchrun. srun starts it on each host of the job's ranks: srun trainer.sh HEAD train.py ...
# torchrun numbers the hosts by their addresses, compared as text, which must sort as the job's ranks do.
set -euo pipefail
: "${CHECKMATE_JOB:?name the job file}" "${GLOO_SOCKET_IFNAME:?name the interface on the management network}"
head=$1
shift
address=$(ip -4 -o address show dev "$GLOO_SOCKET_IFNAME" | awk '{ sub("/.*", "", $4); print $4; exit }')
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ -n "${IN_PLACE-}" ]; then # for scripts that call checkmate.resilient: a rank that dies is started alone
    # shellcheck disable=SC2086 # as below
    exec ${CHECKMATE_STARTER-} checkmate launch --nnodes="$SLURM_STEP_NUM_NODES" --node-rank="$SLURM_NODEID" \
        --spare -- "$@"
fi
# shellcheck disable=SC2086 # the starter is a command with options (docs/security.md), or nothing as root
exec ${CHECKMATE_STARTER-} torchrun --nnodes="$SLURM_STEP_NUM_NODES" --nproc-per-node="${RANKS_PER_HOST:-gpu}" \
    --rdzv-backend=c10d --rdzv-endpoint="$head:29400" --rdzv-conf="is_host=$((SLURM_NODEID == 0))" \
    --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --local-addr="$address" --max-restarts=10 "$@"
