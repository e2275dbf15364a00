"""CUDA memory snapshots: reading them, accounting for their bytes, replaying the allocator exactly, asking what if.

Needs no torch and no GPU. :mod:`reading` and :mod:`parsing` make a :class:`~gpuwatch.allocator.shapes.Snapshot` of a
file or of the dictionary ``torch.cuda.memory._snapshot()`` returns; :mod:`replay` says how faithful the model is to it;
:mod:`whatif` runs the same requests under other settings; :mod:`recommendation` makes one sentence of the outcome.
"""

from __future__ import annotations
