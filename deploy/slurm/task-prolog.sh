#!/bin/sh
# Slurm TaskProlog (runs as the user before each task): what it prints as `export` becomes the task's environment.
# The job's id is taken from SLURM_JOB_ID by itself.
echo "export GPUWATCH_DIR=${GPUWATCH_DIR:-/run/gpuwatch}"
echo "export GPUWATCH_DAEMON=0"
