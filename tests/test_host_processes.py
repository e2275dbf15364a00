"""Children, workers and ends by force: what belongs to which process."""

from __future__ import annotations

import contextlib
import os
import signal
import textwrap
from pathlib import Path

import pytest
from torch import nn

import gpuwatch
from gpuwatch.layout import State
from gpuwatch.reader import Snapshot, read_all
from gpuwatch.report.document import cause_of
from tests.programs import Ended, Programs

PROGRAM = """
import multiprocessing, os, resource, signal, sys, threading, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import gpuwatch


class Data(Dataset):
    def __init__(self, inner=None):
        self.inner = inner

    def __len__(self):
        return 200

    def __getitem__(self, index):
        {in_dataset}
        return torch.ones(4)


model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)


def train(steps, loader):
    for step, batch in zip(range(steps), loader):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()


def own_record():
    (name,) = os.listdir(os.environ["GPUWATCH_DIR"])
    # Opened by a child: a process that opens its own record loses the lease.
    reading = os.popen("md5sum " + os.path.join(os.environ["GPUWATCH_DIR"], name)).read()
    return reading.split()[0]


def main():
    loader = DataLoader(Data(), 2)
    watch = gpuwatch.attach(model, loader)
    {body}


if __name__ == "__main__":
    main()
"""


def program(body: str, in_dataset: str = "pass") -> str:
    """The program with these lines in ``main``."""
    return PROGRAM.format(body=textwrap.indent(textwrap.dedent(body), "    ").strip(), in_dataset=in_dataset)


def only_record(ended: Ended) -> Snapshot:
    """The one record the program left."""
    (record,), rejected = read_all(ended.records)
    assert not rejected
    return record


CHILDREN = {
    "os.fork": """
        child = os.fork()
        if child == 0:
            train(80, loader)
            print("child trained")
            sys.exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    """,
    "multiprocessing": """
        child = multiprocessing.get_context("fork").Process(target=train, args=(80, loader))
        child.start()
        child.join()
        assert child.exitcode == 0
    """,
    "a fork that fails": """
        child = os.fork()
        if child == 0:
            train(80, loader)
            raise ZeroDivisionError
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    """,
    "a fork that is watched itself": """
        child = os.fork()
        if child == 0:
            os.environ["GPUWATCH_DIR"] += "-of-the-child"
            own = gpuwatch.attach(nn.Linear(1, 1))
            train(3, loader)
            own.detach()
            os._exit(len(os.listdir(os.environ["GPUWATCH_DIR"])))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    """,
}


@pytest.mark.parametrize("steps", [3, 80], ids=["during a look", "between looks"])
@pytest.mark.parametrize("name", CHILDREN)
def test_a_child_says_nothing_and_leaves_the_record_of_its_parent_alone(
    name: str, steps: int, programs: Programs
) -> None:
    body = f"""
    train({steps}, loader)
    sys.stdout.flush()
    {{child}}
    print("the same" if own_record() == before else "changed")
    train(10, loader)
    print(watch._run.session.record.words[8])
    """
    child = textwrap.indent("before = own_record()\n" + textwrap.dedent(CHILDREN[name]).strip(), "    ").strip()
    ended = programs.run(program(body.replace("{child}", child)))
    assert ended.status == 0, ended.err
    assert ended.out.splitlines()[-2:] == ["the same", str(steps + 10)]
    assert ended.err.count("the whole report") == 1
    record = only_record(ended)
    assert (record.step, record.state) == (steps + 10, State.CLEAN)


OWN_CHILDREN = """
import multiprocessing, os, sys
import torch
from torch import nn
import gpuwatch

def train(name, code):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    gpuwatch.attach(model, name=name)
    for step in range(70):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    exec(code)

for name, code in CODES.items():
    child = multiprocessing.get_context("fork").Process(target=train, args=(name, code))
    child.start()
    child.join()
    print(name, child.exitcode)
"""

OWN_ENDS = {
    "clean": ("pass", 0, State.CLEAN, None),
    "error": ("raise KeyError('x')", 1, State.EXCEPTION, "KeyError"),
    "exit": ("sys.exit(3)", 3, State.EXCEPTION, "exit status 3"),
    "raised": ("raise SystemExit(0)", 0, State.CLEAN, None),
    "printed": (
        "try: 1 / 0\nexcept ZeroDivisionError: sys.exit(1)",
        1,
        State.EXCEPTION,
        "exit status 1, as ZeroDivisionError was handled",
    ),
}


def test_children_that_are_watched_themselves_say_how_they_end(programs: Programs) -> None:
    codes = {name: code for name, (code, *_) in OWN_ENDS.items()}
    ended = programs.run(OWN_CHILDREN.replace("CODES", repr(codes)))
    assert ended.status == 0, ended.err
    assert ended.out.splitlines() == [f"{name} {status}" for name, (_, status, *_) in OWN_ENDS.items()]
    records, rejected = read_all(ended.records)
    assert not rejected and [record.step for record in records] == [70] * len(OWN_ENDS)
    assert {record.run: (record.state, cause_of(record)) for record in records} == {
        name: (state, cause) for name, (*_, state, cause) in OWN_ENDS.items()
    }


def test_what_goes_through_the_watch_as_a_context_ends_the_run(records: Path) -> None:
    for error in (ValueError("x"), SystemExit(2), SystemExit(0), GeneratorExit()):
        with contextlib.suppress(BaseException), gpuwatch.attach(nn.Linear(1, 1), name=repr(error)):
            raise error
    assert {record.run: (record.state, cause_of(record)) for record in read_all(records)[0]} == {
        "ValueError('x')": (State.EXCEPTION, "ValueError"),
        "SystemExit(2)": (State.EXCEPTION, "exit status 2"),
        "SystemExit(0)": (State.DETACHED, None),
        "GeneratorExit()": (State.DETACHED, None),
    }


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_every_kind_load_and_attach_nothing(method: str, programs: Programs) -> None:
    ended = programs.run(
        program(
            f"""
            outer = DataLoader(Data(loader), 20, num_workers=1, multiprocessing_context="{method}")
            gpuwatch.attach(model, outer)
            train(10, outer)
            """,
            in_dataset="assert gpuwatch.attach(model, [1]).run is None\n"
            f"        assert {method == 'fork'} or type(self.inner) is DataLoader",
        )
    )
    assert ended.status == 0, ended.err
    assert ended.err.count("the whole report") == 1
    assert only_record(ended).step == 10


@pytest.mark.parametrize("steps", [7, 101, 150])
def test_a_killed_process_leaves_its_last_step(steps: int, programs: Programs) -> None:
    ended = programs.run(program(f"train({steps}, DataLoader(Data(), 1))\nos.kill(os.getpid(), signal.SIGKILL)"))
    assert ended.status == -signal.SIGKILL and ended.err == ""
    record = only_record(ended)
    assert not record.up and record.state is State.RUNNING and record.ended is None
    assert record.step == steps


def test_a_directory_that_cannot_be_made_is_one_line_and_training_goes_on(programs: Programs) -> None:
    ended = programs.run(program("train(80, loader)\nprint('trained')"), GPUWATCH_DIR="/proc/nowhere")
    assert (ended.status, ended.out) == (0, "trained\n")
    (line,) = ended.err.splitlines()
    assert line.startswith("gpuwatch has no flight record in /proc/nowhere") and "Set GPUWATCH_DIR" in line


def test_a_disk_that_is_full_is_one_line_and_training_goes_on(programs: Programs) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
    ended = programs.run(limit + program("train(80, loader)\nprint('trained')"))
    assert (ended.status, ended.out) == (0, "trained\n")
    (line,) = ended.err.splitlines()
    assert line.startswith("gpuwatch has no flight record in") and "File too large" in line
    assert not any(ended.records.iterdir()), "nothing half made is left"


def test_a_record_removed_under_a_run_does_not_matter(programs: Programs) -> None:
    ended = programs.run(
        program(
            """
            import shutil
            train(5, loader)
            shutil.rmtree(os.environ["GPUWATCH_DIR"])
            train(90, loader)
            print("trained")
            """
        )
    )
    assert (ended.status, ended.out) == (0, "trained\n")
    assert "Traceback" not in ended.err


def test_the_lease_is_held_to_the_end(programs: Programs) -> None:
    ended = programs.run(
        program(
            """
            train(90, loader)
            from gpuwatch.reader import read_all
            child = os.fork()
            if child == 0:
                import pathlib
                (record,), _ = read_all(pathlib.Path(os.environ["GPUWATCH_DIR"]))
                os._exit(int(record.up))
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            """
        )
    )
    assert ended.out == "1\n", ended.err
    assert not only_record(ended).up


def test_an_exit_without_handlers_leaves_a_record_that_ended_without_a_mark(programs: Programs) -> None:
    ended = programs.run(program("train(70, loader)\nos._exit(4)"))
    assert (ended.status, ended.err) == (4, "")
    assert only_record(ended).step == 70


def test_the_programs_run_in_a_directory_of_their_own(programs: Programs) -> None:
    ended = programs.run("import os\nprint(os.getcwd(), os.getpid())")
    assert Path(ended.out.split()[0]) == ended.records.parent
    assert int(ended.out.split()[1]) != os.getpid()
