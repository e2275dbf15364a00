#!/bin/sh
# Slurm Epilog (runs as root on each node after a job): of a user who has nothing left running here, the newest records
# stay, for reports, and older ones go with the memory snapshots beside them.
# It never fails: an Epilog that does drains the node.
directory=${GPUWATCH_DIR:-/run/gpuwatch}
kept=${GPUWATCH_KEPT_RECORDS:-64}

[ -n "${SLURM_JOB_UID:-}" ] && [ -d "$directory" ] || exit 0
pgrep -U "$SLURM_JOB_UID" >/dev/null 2>&1
[ $? -eq 1 ] || exit 0 # a process lives, or pgrep could not tell
# shellcheck disable=SC2016 # the inner shell expands it
# Names end with NUL: a user may put a newline into one, and the rest of it would be somebody else's file.
find "$directory" -maxdepth 1 -type f -name '*.gpw' -uid "$SLURM_JOB_UID" -printf '%T@ %p\0' 2>/dev/null |
  sort -z -r -n | tail -z -n "+$((kept + 1))" | cut -z -d ' ' -f 2- |
  xargs -0 -r sh -c 'for record; do rm -f -- "$record" "${record%.gpw}.pickle"; done' sh
exit 0
