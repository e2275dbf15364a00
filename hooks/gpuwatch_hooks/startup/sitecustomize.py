"""Loaded by python itself at its start in everything that ``gpuwatch run`` runs; see ``gpuwatch_hooks.arrival``.

Any Python may come here, also one without gpuwatch: then nothing happens.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [place for place in sys.path if os.path.abspath(place) != _here]

try:
    from gpuwatch_hooks.arrival import expect
except (ImportError, SyntaxError):
    pass
else:
    expect()

# The sitecustomize that python would have loaded without this one.
_spec = PathFinder.find_spec("sitecustomize")
if _spec is not None and _spec.loader is not None:
    _module = module_from_spec(_spec)
    sys.modules["sitecustomize"] = _module
    _spec.loader.exec_module(_module)
