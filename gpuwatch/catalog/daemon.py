"""The daemon itself."""

from __future__ import annotations

from gpuwatch.catalog.naming import node_metric

BUILD_INFO = node_metric("build_info", "info", "1", "Version of the daemon.", "version")
SOURCE_UP = node_metric("source_up", "gauge", "bool", "1 when the source answered at the last collection.", "source")
SOURCE_SECONDS = node_metric(
    "source_collect_seconds", "gauge", "seconds", "How long the last collection took.", "source"
)
SOURCE_TIME = node_metric(
    "source_last_collect_timestamp_seconds", "gauge", "seconds", "When the source last answered, Unix time.", "source"
)
RECORDS = node_metric("records", "gauge", "1", "Flight records read at the last collection.")
RECORDS_REJECTED = node_metric("records_rejected", "gauge", "1", "Files that are not valid records.", "reason")
SERIES_DROPPED = node_metric(
    "series_dropped", "gauge", "1", "Series of records left out: unknown name, labels or too many."
)
DIRECTORY_BYTES = node_metric(
    "directory_bytes", "gauge", "bytes", "What the files in the directory of records take on the disk."
)
DIRECTORY_FILES = node_metric("directory_files", "gauge", "1", "Files in the directory of records, of any kind.")
DIRECTORY_FREE = node_metric(
    "directory_free_bytes", "gauge", "bytes", "Space that is left on the file system of the directory of records."
)
