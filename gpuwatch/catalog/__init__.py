"""Every metric gpuwatch publishes: a metric is a line in this package, and nowhere else.

Names follow Prometheus: base units in the name, ``_total`` on counters, identity in ``_info`` metrics. Readings of a
rank carry ``run`` and ``rank``, readings of a GPU ``gpu`` and ``uuid``; a metric's own labels come on top. A reading
that is not known is absent, never 0, NaN or a sentinel.
"""

from __future__ import annotations

from gpuwatch.catalog.daemon import *
from gpuwatch.catalog.distributed import *
from gpuwatch.catalog.earlier import *
from gpuwatch.catalog.hardware import *
from gpuwatch.catalog.loading import *
from gpuwatch.catalog.memory import *
from gpuwatch.catalog.naming import *
from gpuwatch.catalog.ranks import *
from gpuwatch.catalog.timing import *
from gpuwatch.catalog.unpublished import *
from gpuwatch.expr import Metric

METRICS: dict[str, Metric] = {metric.name: metric for metric in list(globals().values()) if isinstance(metric, Metric)}
"""Every metric by name."""
