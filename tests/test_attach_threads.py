"""Two threads that attach at once share one run, and it ends in order."""

from __future__ import annotations

from gpuwatch.layout import State
from gpuwatch.reader import read_all
from tests.programs import Programs

PROGRAM = """
import os, threading, time
import torch
from torch import nn
import gpuwatch
from gpuwatch_hooks import attach, session

made = session.Session.__init__

def slowly(self, *arguments):
    made(self, *arguments)
    time.sleep(0.2)  # the other thread comes meanwhile

session.Session.__init__ = slowly
together = threading.Barrier(2)

def train():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    together.wait()
    gpuwatch.attach(model)
    for _ in range(30):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    together.wait()

threads = [threading.Thread(target=train) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
if {fork}:
    attach._making.acquire()  # as a thread that attaches while another one forks
    child = os.fork()
    if not child:
        done = threading.Thread(target=lambda: gpuwatch.attach(nn.Linear(1, 1)), daemon=True)
        done.start()
        done.join(20)
        os._exit(7 if done.is_alive() else 3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_two_threads_share_one_run(programs: Programs) -> None:
    ended = programs.run(PROGRAM.replace("{fork}", "False"), GPUWATCH_QUIET="1", GPUWATCH_DAEMON="0")
    assert (ended.status, ended.err) == (0, "")
    (snapshot,) = read_all(ended.records)[0]
    assert snapshot.state is State.CLEAN


def test_a_child_of_a_process_that_was_attaching_can_attach(programs: Programs) -> None:
    ended = programs.run(PROGRAM.replace("{fork}", "True"), GPUWATCH_QUIET="1", GPUWATCH_DAEMON="0")
    assert (ended.status, ended.out) == (0, "3\n")
