#!/bin/sh
# Slurm Prolog (runs as root on each node before a job): there is a directory of records, and a daemon that serves it.
# It never fails: a Prolog that does drains the node, and monitoring must not.
directory=${GPUWATCH_DIR:-/run/gpuwatch}
command=${GPUWATCH_COMMAND:-/opt/gpuwatch/bin/gpuwatch}
listen=${GPUWATCH_LISTEN:-127.0.0.1:9847}
user=${GPUWATCH_USER:-gpuwatch}

if [ ! -d "$directory" ]; then
  install -d -o "$user" -g "$user" -m 3733 "$directory" || exit 0
fi
if timeout 5 systemctl cat gpuwatch.service >/dev/null 2>&1; then
  timeout 5 systemctl start --no-block gpuwatch.service || true
elif [ -x "$command" ]; then
  # Without the service: a daemon of its own. One that finds another at work on the directory ends by itself.
  setsid setpriv --reuid "$user" --regid "$user" --clear-groups \
    "$command" serve --listen "$listen" --dir "$directory" </dev/null >/dev/null 2>&1 &
fi
exit 0
