#!/bin/bash
# One machine's shadow node, which is started again if it fails: srun shadow.sh. It ends with status 0 on SIGTERM.
set -euo pipefail
: "${CHECKMATE_JOB:?name the job file}"
child="" stopped=""
trap 'stopped=1; [ -z "$child" ] || kill -TERM "$child"' TERM INT
while [ -z "$stopped" ]; do
    # shellcheck disable=SC2086 # as in trainer.sh
    ${CHECKMATE_SHADOW_STARTER-} checkmate shadow --no-view "$CHECKMATE_JOB" &
    child=$! status=0
    wait "$child" || status=$?
    if [ -n "$stopped" ]; then
        wait "$child" || exit 0 # the signal interrupted the first wait
        exit 0
    fi
    [ "$status" -ne 0 ] || exit 0
    [ "$status" -ne 2 ] || exit 2 # bad input: another start does not help
    sleep 1
done
