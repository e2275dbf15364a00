"""The data path: loaders, their workers, the way to the device."""

from __future__ import annotations

from gpuwatch.catalog.naming import rank_metric

LOADER_WORKERS = rank_metric("loader_workers", "gauge", "workers", "Worker processes of the watched loader.")
LOADER_PERSISTENT = rank_metric("loader_persistent_workers", "gauge", "bool", "1 when workers outlive an epoch.")
LOADER_ITEM_SECONDS = rank_metric(
    "loader_item_seconds",
    "gauge",
    "seconds",
    "Median time to make one item of a batch, its share of collation included, on the thread that makes it.",
)
WORKER_CPU_WAIT = rank_metric(
    "loader_worker_cpu_wait_ratio", "gauge", "ratio", "Share of its time a loader worker waited for a core."
)
LOADER_BATCH = rank_metric("loader_batch_items", "gauge", "items", "Items of a batch of the watched loader.")
LOADER_SHARE = rank_metric(
    "loader_batches_ratio", "gauge", "ratio", "Share of the batches trained on that this loader gave, of late."
)
LOADER_PREFETCH = rank_metric("loader_prefetch_batches", "gauge", "batches", "Batches each worker loads ahead.")
LOADER_PINNING = rank_metric("loader_pin_memory", "gauge", "bool", "1 when the loader copies batches to pinned memory.")
LOADER_PART_SECONDS = rank_metric(
    "loader_batch_part_seconds",
    "gauge",
    "seconds",
    "Median time of a batch by part: items, collate, transfer (worker to training process), pin, copy (to the device), "
    "sampler (its indices, on the training thread).",
    "part",
)
LOADER_ORDER_SECONDS = rank_metric(
    "loader_order_seconds",
    "gauge",
    "seconds",
    "Median time of the sampler for all that an epoch's first batch needs, on the training thread.",
)
LOADER_RECEIVE_CPU_SECONDS = rank_metric(
    "loader_receive_cpu_seconds",
    "gauge",
    "seconds",
    "Median CPU time of the training thread to take a batch from a worker: to unpickle it, above all.",
)
LOADER_BATCH_SECONDS = rank_metric(
    "loader_batch_seconds",
    "summary",
    "seconds",
    "Quantiles of the time to make a batch: items and collate.",
    "quantile",
)
LOADER_BATCH_CPU_SECONDS = rank_metric(
    "loader_batch_cpu_seconds", "gauge", "seconds", "Mean CPU time to make a batch, on the thread that makes it."
)
LOADER_BATCH_BYTES = rank_metric("loader_batch_bytes", "gauge", "bytes", "Bytes of the tensors of a batch.")
LOADER_READY = rank_metric(
    "loader_ready_ratio", "gauge", "ratio", "Share of looked-at fetches that found a batch ready (fed, not starved)."
)
LOADER_DATASET_ITEMS = rank_metric(
    "loader_dataset_items", "gauge", "items", "Items of the data set, where it has a length."
)
WORKER_BUSY = rank_metric(
    "loader_worker_busy_ratio", "gauge", "ratio", "Share of its time a worker makes batches, mean."
)
WORKER_CPU = rank_metric(
    "loader_worker_cpu_ratio",
    "gauge",
    "ratio",
    "Share of the time a worker makes batches that it runs on a core, mean.",
)
WORKER_BLOCKED = rank_metric(
    "loader_worker_blocked_ratio",
    "gauge",
    "ratio",
    "Share of the time a worker makes batches that it waits for storage, a network or a lock, not for a core; mean.",
)
WORKER_RESIDENT = rank_metric(
    "loader_worker_resident_bytes", "gauge", "bytes", "Resident set of the largest loader worker."
)
WORKER_UNIQUE = rank_metric(
    "loader_worker_unique_bytes", "gauge", "bytes", "Memory of the largest loader worker that it shares with nobody."
)
WORKER_COPIED = rank_metric(
    "loader_workers_copied_bytes",
    "gauge",
    "bytes",
    "Python objects of the data set that loader workers copied by reading them, all workers together; estimated.",
)
WORKERS_IDLE = rank_metric(
    "loader_idle_workers", "gauge", "workers", "Living worker processes of loaders that nobody iterates any more."
)
LOADERS_BUILT = rank_metric(
    "loaders_built_total", "counter", "1", "Loaders of the training data so far: more than 1 where it is built anew."
)
WORKER_DEATHS = rank_metric("loader_worker_deaths_total", "counter", "1", "Loader workers that died while in use.")
BATCH_PINNED = rank_metric("loader_batch_pinned", "gauge", "bool", "1 when the batches that come are in pinned memory.")
PADDING = rank_metric(
    "loader_padding_ratio",
    "gauge",
    "ratio",
    "Median share of padding in the batches, by their attention mask, or by runs of one id at the ends of rows.",
)
LOADER_BEST_WORKERS = rank_metric(
    "loader_recommended_workers", "gauge", "workers", "Worker processes that this run's own costs ask for."
)
LOADER_BEST_PREFETCH = rank_metric(
    "loader_recommended_prefetch_batches", "gauge", "batches", "Batches each of them should load ahead."
)
LOADER_BEST_WAIT = rank_metric(
    "loader_recommended_wait_ratio", "gauge", "ratio", "Share of step time that would still be spent waiting then."
)
LOADER_NEEDED_CORES = rank_metric(
    "loader_needed_cores", "gauge", "cores", "Cores at which making the batches would no longer hold training up."
)
LOADER_ALONE = rank_metric(
    "loader_batch_alone_seconds", "gauge", "seconds", "Mean time to make a batch, waits for a core left out."
)
LOADER_AFFORDABLE = rank_metric(
    "loader_affordable_batch_seconds",
    "gauge",
    "seconds",
    "Mean time to make a batch at which training would hardly wait, with the workers that fit; absent if it is less.",
)
LOADER_CROWDED = rank_metric(
    "loader_crowded_out",
    "gauge",
    "bool",
    "1 when batches are late for want of cores alone: they are ready, or would be by what they cost.",
)
LOADER_EXPECTED_WAIT = rank_metric(
    "loader_expected_wait_seconds",
    "gauge",
    "seconds",
    "Mean wait of a step with the present setting, by what batches and training cost, waits for a core left out.",
)
LOADER_OWN_RATIO = rank_metric(
    "loader_own_wait_ratio",
    "gauge",
    "ratio",
    "Share of the wait for a batch (of 5 ms, where it is shorter) that is the training thread's own work: the sampler, "
    "and unpickling.",
)
SHARED_MEMORY_USED = rank_metric("shared_memory_used_bytes", "gauge", "bytes", "Bytes in use in /dev/shm.")
SHARED_MEMORY_TOTAL = rank_metric("shared_memory_total_bytes", "gauge", "bytes", "Size of /dev/shm.")
