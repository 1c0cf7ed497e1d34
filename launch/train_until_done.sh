#!/bin/bash
# Run `hybridflow train` with these arguments on a started Ray cluster, again for as long as it ends with status 75.
#
# Status 75: a worker or a node was lost, or no space was left. The same command continues from the last checkpoint.
# SIGTERM goes to the run, which finishes its step, saves and ends with status 0.
stopped=
trap 'stopped=1; kill -TERM "$run" 2> /dev/null' TERM
while true; do
    hybridflow train "$@" controller.backend=ray controller.address=auto &
    run=$!
    while true; do
        wait "$run"
        status=$?
        kill -0 "$run" 2> /dev/null || break # otherwise a signal has ended the wait
    done
    if [ "$status" -ne 75 ] || [ -n "$stopped" ]; then exit "$status"; fi
    echo "hybridflow train ended with status 75; continuing in ${RETRY_AFTER_S:-30} s" >&2
    sleep "${RETRY_AFTER_S:-30}"
done
