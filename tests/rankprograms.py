"""Programs of two ranks on gloo: forked from an interpreter that has torch, as a launcher would start them."""

from __future__ import annotations

import textwrap

from tests.programs import Ended, Programs

PROGRAM = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn

RANKS = 2
children = []
for RANK in range(RANKS):
    child = os.fork()
    if not child:
        os.environ.update(RANK=str(RANK), LOCAL_RANK=str(RANK), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
        break
    children.append(child)
else:
    @PARENT@
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
    sys.exit()

import gpuwatch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=RANK, world_size=RANKS)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 1)

    def forward(self, batch):
        here("forward")
        hidden = self.norm(self.first(batch))
        if batch.requires_grad is False:
            hidden.register_hook(lambda gradient: here("backward"))
        return self.last(hidden)


def here(place):
    @HERE@


step = 0
loader = DataLoader(TensorDataset(torch.randn(2000, 8)), 8)
net = Net()
@MODEL@
optimizer = torch.optim.SGD(model.parameters(), 0.01)
watch = gpuwatch.attach(model, loader)
for step, (batch,) in zip(range(@STEPS@), loader):
    here("loop")
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
    here("end")
state = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
local = [getattr(each, "_local_tensor", each) for each in state]
result = hash(tuple(number for each in local for number in each.detach().flatten().tolist()))
os.write(1, f"rank {RANK} {result}\\n".encode())  # at once: two processes write
dist.barrier()
dist.destroy_process_group()
"""


def ranks(
    programs: Programs,
    here: str = "pass",
    model: str = "model = DistributedDataParallel(net)",
    steps: int = 60,
    parent: str = "pass",
    **environment: str,
) -> Ended:
    """Run it; ``here`` is what a rank does at places of its step, ``parent`` what its launcher does meanwhile."""
    text = PROGRAM.replace("@STEPS@", str(steps)).replace("@MODEL@", textwrap.dedent(model).strip())
    for mark, code in (("@HERE@", here), ("@PARENT@", parent)):
        text = text.replace(mark, textwrap.indent(textwrap.dedent(code).strip(), "    ").lstrip())
    return programs.run(text, **environment)
