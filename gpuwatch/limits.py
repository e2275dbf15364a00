"""Limits that both sides go by: the rules fire beyond them, and the hooks look at step after step up to them."""

from __future__ import annotations

SWITCH_STEPS = 50
"""A debugging switch that is on for no more steps in a row was meant: a NaN hunt, a profiler's window."""

ZEROED_STEPS = 40
"""Checked steps in a row with gradients filled with zeros."""

KEPT_STEPS = 50
"""Optimizer steps in a row on gradients that were never cleared."""

EVAL_MODE_STEPS = 20
"""Optimizer steps since an evaluation that left the model in eval mode."""

HOST_GROWTH_BYTES = 16384
"""Growth of host memory in use, in bytes a step, from which it is a leak: an allocator's noise is far below."""

COPIED_BYTES = 32 << 20
"""Copies of a data set's objects, of all loader workers together, below which nothing is said of them."""

REGRESSION_STEP_RATIO = 1.10
"""A median step this many times the earlier one is a regression."""

REGRESSION_MEMORY_RATIO = 1.10
"""A peak of memory this many times the earlier one is a regression."""

REGRESSION_WAIT_POINTS = 0.05
"""A share of step time spent waiting for data that is this much larger than the earlier one is a regression."""

IDLE_GPU_RATIO = 0.05
"""A GPU that ran kernels for less than this share of ten minutes did nothing."""

REGRESSION_DAYS = 7
"""Earlier runs that ended longer ago are not compared with: code and machines have changed since."""

AGREEING_STEPS = 2
"""Slow steps that must have grown in the same phase before it is named: one may be the machine's own hiccup."""

KEPT_GRAPHS = 30
"""Steps that ended a while ago and whose graphs are still referenced."""

STARVED_WORKERS = 0.3
"""Share of their time that loader workers wait for a core, from which they have too few."""

SHORT_WAIT_SECONDS = 0.005
"""A wait for data below which it is none, whatever it is spent on."""
