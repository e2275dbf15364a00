"""The rank itself: who it is, how far it got, what was observed of it."""

from __future__ import annotations

from gpuwatch.catalog.naming import rank_metric

CPU_BUDGET = rank_metric(
    "cpu_budget_cores", "gauge", "cores", "Cores this rank may use: affinity and cgroup quota over the node's ranks."
)
TRAINING_CORES = rank_metric(
    "training_cores", "gauge", "cores", "Cores the training process itself keeps busy, its workers left out."
)
TORCH_THREADS = rank_metric("torch_threads", "gauge", "threads", "Threads torch uses inside an operator.")
LOCAL_RANKS = rank_metric("local_world_size", "gauge", "ranks", "Ranks of this run on this node.")
OTHER_THREAD_CORES = rank_metric(
    "other_python_thread_cores", "gauge", "cores", "Cores that other Python threads of the process keep busy."
)
CPU_WAIT_SECONDS = rank_metric(
    "cpu_wait_seconds_total", "counter", "seconds", "Time the training thread was ready to run but had no core."
)

# -- findings
OBSERVATION = rank_metric(
    "observation", "gauge", "1", "What a hook observed for a rule; the rule says in which unit.", "rule", "where"
)

# -- identity and life
RANK_INFO = rank_metric(
    "rank_info",
    "info",
    "1",
    "Who the rank is, and of which job and experiment.",
    "local_rank",
    "world_size",
    "node",
    "job_id",
    "experiment",
    "pid",
    "restart",
    "script",
    "torch",
)
RANK_UP = rank_metric("rank_up", "gauge", "bool", "1 while the process holds its record's lease.")
RANK_ENDED = rank_metric("rank_ended", "gauge", "bool", "1 when the process wrote an end mark, by an exception too.")
RANK_EXIT_INFO = rank_metric("rank_exit_info", "info", "1", "How an ended rank ended.", "cause")
RANK_LAST_STEP = rank_metric(
    "rank_last_step", "gauge", "steps", "The last completed step; stays after the process is gone."
)
RANK_START_TIME = rank_metric("rank_start_time_seconds", "gauge", "seconds", "When the rank was attached, Unix time.")
RANK_STEP_AGE = rank_metric("rank_step_age_seconds", "gauge", "seconds", "Time since the last completed step.")
RANK_PROGRESS_AGE = rank_metric(
    "rank_progress_age_seconds", "gauge", "seconds", "Time since a hook last saw the run do anything."
)
RANK_POSITION = rank_metric(
    "rank_position_steps",
    "gauge",
    "steps",
    "How far the rank is, in steps and parts of one: of several that wait for each other the smallest is behind.",
)
RANK_BUSY = rank_metric(
    "rank_busy_cores",
    "gauge",
    "cores",
    "Cores that a rank of which no hook has seen anything for a minute keeps busy or waits for, with its children.",
)
RANK_GONE_TIME = rank_metric(
    "rank_gone_timestamp_seconds",
    "gauge",
    "seconds",
    "When a rank that left no end mark was last seen alive, Unix time.",
)
GUARD_FAULTS = rank_metric(
    "guard_faults_total", "counter", "1", "Faults of gpuwatch's own hooks that were kept from the run.", "probe"
)
