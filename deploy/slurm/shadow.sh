#!/bin/bash
# One machine's shadow node: srun shadow.sh. It is started again if it fails, or ends because somebody has told it to,
# as after checkmate drain. A SIGTERM to this script ends both, with status 0.
set -euo pipefail
: "${CHECKMATE_JOB:?name the job file}"
child="" stopped=""
trap 'stopped=1; [ -z "$child" ] || kill -TERM "$child" 2> /dev/null || true' TERM INT
while [ -z "$stopped" ]; do
    # shellcheck disable=SC2086 # as in trainer.sh
    ${CHECKMATE_SHADOW_STARTER-} checkmate shadow --no-view "$CHECKMATE_JOB" &
    child=$! status=0
    [ -z "$stopped" ] || kill -TERM "$child" 2> /dev/null || true # the signal came before its number was known
    wait "$child" || status=$?
    if [ -n "$stopped" ]; then
        wait "$child" || exit 0 # the signal interrupted the first wait
        exit 0
    fi
    child="" # another process may get its number
    [ "$status" -ne 2 ] || exit 2 # bad input: another start does not help
    sleep 1
done
