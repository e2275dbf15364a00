"""Where the run's time goes, written by the training process or worked out of its ring of steps."""

from __future__ import annotations

from gpuwatch.catalog.naming import rank_metric

# -- the run's time
STEPS = rank_metric(
    "steps_total", "counter", "steps", "Training steps completed (optimizer steps, or batches without one)."
)
BATCHES = rank_metric("batches_total", "counter", "batches", "Batches the watched loaders delivered to training.")
PHASE_SECONDS = rank_metric(
    "phase_seconds_total", "counter", "seconds", "Time of training steps by phase, evaluation left out.", "phase"
)
STEP_SECONDS = rank_metric("step_seconds", "histogram", "seconds", "Duration of a training step, evaluation left out.")
EVALUATION_SECONDS = rank_metric("evaluation_seconds_total", "counter", "seconds", "Time in evaluation phases.")
EVALUATION_FORWARDS = rank_metric("evaluation_forwards_total", "counter", "1", "Forward passes in evaluation phases.")
BETWEEN_SECONDS = rank_metric(
    "between_seconds_total", "counter", "seconds", "Time between steps: set-up, checkpoints between epochs, user code."
)
EPOCH_STARTS = rank_metric("epoch_starts_total", "counter", "1", "Times a watched loader was started.")
EPOCH_START_SECONDS = rank_metric(
    "epoch_start_seconds_total", "counter", "seconds", "Wait for the first batch of an epoch, loader start included."
)
EPOCH_RESTARTS = rank_metric("epoch_restarts_total", "counter", "1", "Loader starts after a loader's first.")
EPOCH_RESTART_SECONDS = rank_metric(
    "epoch_restart_seconds_total", "counter", "seconds", "Wait for the first batch of every epoch but the first."
)
DEVICE_PHASE_SECONDS = rank_metric(
    "device_phase_seconds_total", "counter", "seconds", "Time of sampled steps by the accelerator's own clock.", "phase"
)

# -- the recent window, computed by the reader from the record's ring of steps
WINDOW_STEP_SECONDS = rank_metric(
    "window_step_seconds", "summary", "seconds", "Quantiles of recent untagged steps.", "quantile"
)
WINDOW_WAIT_SECONDS = rank_metric("window_data_wait_seconds", "gauge", "seconds", "Median recent wait for a batch.")
WINDOW_SLOW_RATIO = rank_metric(
    "window_slow_steps_ratio", "gauge", "ratio", "Share of recent untagged steps that are outliers (median and MAD)."
)
WINDOW_SLOW_EXCESS_SECONDS = rank_metric(
    "window_slow_excess_seconds", "gauge", "seconds", "Median time an outlier takes beyond a median step."
)
WINDOW_JITTER_RATIO = rank_metric("window_jitter_ratio", "gauge", "ratio", "Mean over median of recent untagged steps.")

# -- the interpreter
GC_PAUSES = rank_metric("gc_pauses_total", "counter", "1", "Full (oldest generation) garbage collections.")
GC_PAUSE_SECONDS = rank_metric("gc_pause_seconds_total", "counter", "seconds", "Time in full garbage collections.")
GC_ENABLED = rank_metric("gc_enabled", "gauge", "bool", "1 while automatic garbage collection is on.")
GC_LONGEST = rank_metric("gc_longest_pause_seconds", "gauge", "seconds", "The longest full collection so far.")
