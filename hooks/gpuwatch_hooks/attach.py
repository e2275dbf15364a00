"""``gpuwatch.attach``: the door between the user's program and everything else here."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch.utils.data import get_worker_info

from gpuwatch import config
from gpuwatch.catalog import CPU_BUDGET
from gpuwatch.interruption import expected
from gpuwatch.layout import State
from gpuwatch.reader import remove_old
from gpuwatch_hooks import backward, buffers, follow, guard, hiding, loader, model, modes, optimizers, whereabouts
from gpuwatch_hooks.ending import end_state, follow_child, follow_exits, note, note_uncaught, uncaught
from gpuwatch_hooks.guard import guarded, log
from gpuwatch_hooks.identity import cpu_budget, device_of, identity
from gpuwatch_hooks.session import Session

if TYPE_CHECKING:
    from gpuwatch.advisor import Finding
    from gpuwatch.reader import Snapshot

__all__ = ["Watch", "attach"]

_active: _Run | None = None

_making = threading.RLock()
"""Held while a run is made or found: two threads that attach at once share one."""


def _after_fork() -> None:
    global _making
    _making = threading.RLock()  # a thread that held it is not in the child


os.register_at_fork(after_in_child=_after_fork)


class _Run:
    """The session of this process with what has to be taken out again at its end."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.undo: list[Callable[[], None]] = []
        self.watches: list[Watch] = []
        self.optimizers: optimizers.Optimizers | None = None


class Watch:
    """What :func:`attach` returns. A context manager: leaving it detaches."""

    def __init__(self, run: _Run | None, undo: Iterable[Callable[[], None]] = ()) -> None:
        self._run = run
        self._undo = list(undo)
        self._last: Snapshot | None = None

    def findings(self) -> list[Finding]:
        """What is wrong with the run so far, most valuable first. Costs some milliseconds; not for every step."""
        return findings(self) or []

    def detach(self) -> None:
        """Put everything back as it was. The run ends with its last watch."""
        detach(self, None)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        detach(self, error)

    @property
    def run(self) -> str | None:
        """Name of the run, as ``gpuwatch report`` takes it; None when nothing is watched."""
        return None if self._run is None else str(self._run.session.record.identity["run"])


def attach(
    model: torch.nn.Module,
    loader: object | Iterable[object] | None = None,
    *,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    name: str | None = None,
) -> Watch:
    """Watch a training run: one line before the loop.

    ``model`` is what the loop calls, ``loader`` what it iterates over to train; a loader that is not given, or that is
    a plain generator, is not timed. Optimizers are found by themselves; ``optimizer`` names one that holds none of the
    model's own parameters. ``name`` names the run; several attaches of one process share the run of the first.

    Never raises, and never changes the training: where something cannot be watched, a warning says so once.
    """
    watch = Watch(None)
    _attach(watch, model, loader, optimizer, name)
    return watch


@guarded("attach")
def _attach(watch: Watch, watched: torch.nn.Module, loaders: object, optimizer: object, name: str | None) -> None:
    if config.disabled() or get_worker_info() is not None:
        return
    if not isinstance(watched, torch.nn.Module):
        log.warning(
            "gpuwatch.attach got a %s as model, a torch.nn.Module was expected; nothing is watched",
            type(watched).__name__,
        )
        return
    with _making:
        run = _current_run(name, watched)
        if run is None:
            return
        run.watches.append(watch)
    # Step by step into the watch, so that what is in place can be taken out again should the next step fail.
    watch._run = run
    session = run.session
    watch._undo.append(functools.partial(session.forget, weakref.ref(watched)))
    session.add_model(watched)
    session.precision.publish()
    modes.watch(session, watched)
    session.renew_look()
    session.open_look()
    for one in _several(loaders, torch.utils.data.DataLoader):
        restore = follow.adopt(session, one) or loader.install(session, one)
        if restore is not None:
            watch._undo.append(restore)
        elif not isinstance(one, Iterable):
            log.warning(
                "gpuwatch.attach got a %s as loader, something to iterate over was expected", type(one).__name__
            )
        elif not isinstance(one, torch.utils.data.DataLoader):
            log.info("a %s cannot be timed from outside; its waits stay unknown", type(one).__name__)
    for known in _several(optimizer, torch.optim.Optimizer):
        if not isinstance(known, torch.optim.Optimizer):
            log.warning(
                "gpuwatch.attach got a %s as optimizer, a torch.optim.Optimizer was expected", type(known).__name__
            )
        elif run.optimizers is not None:
            run.optimizers.add(known)


def _several(given: object, kind: type) -> list[object]:
    """What was given, one or several of a kind; a list of anything else (batches, say) is one thing."""
    if given is None:
        return []
    if isinstance(given, (list, tuple, set)) and all(isinstance(one, kind) for one in given):
        return list(given)
    return [given]


def _current_run(name: str | None, watched: torch.nn.Module) -> _Run | None:
    global _active
    if _active is not None and _active.session.ended:
        _active = None  # ended, or this process is a fork of the one that made it
    if _active is not None and not _active.session.living():
        end(_active, State.DETACHED)  # its models are gone: another run begins
        _active = None
    if _active is None:
        guard.reset()  # before the session: its own probes may fail as they are made
        directory = config.record_directory()
        remove_old(directory, config.KEPT_RECORDS)  # before this run's own record is there
        try:
            session = Session(directory, identity(None if name is None else str(name), device_of(watched)))
        except expected(OSError) as error:
            log.warning(
                "gpuwatch has no flight record in %s (%s); training goes on unwatched. Set GPUWATCH_DIR to a directory "
                "that can be written",
                directory,
                error.strerror or error,
            )
            return None
        _active = _Run(session)
        session.record.values[session.record.series(CPU_BUDGET.name)] = cpu_budget()
        _active.optimizers, remove = optimizers.install(session)
        _active.undo.append(remove)
        _active.undo.append(modes.install(session))
        if session.pace.several:
            _active.undo.append(whereabouts.install(session))
        session.looks.append(lambda: backward.look(session))
        session.looks.append(lambda: model.look(session))
        session.looks.append(lambda: buffers.look(session))
        _active.undo.append(hiding.install(session))
        _active.undo.append(follow.install(session))
        _active.undo.append(follow_exits(session))
        _active.undo.append(follow_child(farewell))
        _serve(_active)
    return _active


@guarded("daemon")
def _serve(run: _Run) -> None:
    """Start the node's daemon if there is none."""
    if not config.daemon_wanted():
        return
    from gpuwatch import service

    directory = config.record_directory()
    # One rank of a node is enough to ask; a second daemon would only start up to find the first.
    if not int(str(run.session.record.identity["local_rank"])) and service.running(directory) is None:
        service.start(directory)


@guarded("findings")
def findings(watch: Watch) -> list[Finding]:
    """The advisor's findings on the run so far."""
    from gpuwatch.advisor import advise

    if watch._run is None:
        return []
    snapshot = watch._last or watch._run.session.snapshot()
    return advise(snapshot)


@guarded("detach")
def detach(watch: Watch, error: BaseException | None) -> None:
    """Take out one watch's hooks; with the last one the run ends, and ``error``, where there is one, ended it."""
    run = watch._run
    if run is None or watch not in run.watches:
        return
    run.watches.remove(watch)
    for undo in watch._undo:
        undo()
    if not run.watches:
        if isinstance(error, (Exception, KeyboardInterrupt, SystemExit)):
            note(run.session, error)
        watch._last = end(run, State.EXCEPTION if run.session.failed else State.DETACHED)


def end(run: _Run, state: State) -> Snapshot | None:
    """End a run: everything out, the end mark written."""
    for watch in run.watches:
        for undo in watch._undo:
            undo()
    run.watches.clear()
    for undo in run.undo:
        undo()
    run.undo.clear()
    return run.session.finish(state)


@atexit.register
def _at_exit() -> None:
    farewell()
    interactive = sys.flags.interactive or hasattr(sys, "ps1")
    if _active is not None and isinstance(uncaught(), KeyboardInterrupt) and not interactive:
        # Python dies of SIGINT after an interrupt that nothing caught, so that a shell's loop ends too; but it forgets
        # that when a text is executed meanwhile, as every dataclass does that the summary imports. This reminds it.
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


@guarded("exit")
def farewell() -> None:
    """The process ends: end the run and say in a few lines on stderr what there is to say."""
    run = _active
    if run is None or run.session.ended:
        return
    note_uncaught(run.session)
    last = end(run, end_state(run.session))
    if last is None or config.quiet() or os.getpid() != last.pid:
        return
    from gpuwatch.report.summary import summary_lines

    text = "\n".join(summary_lines(last)) + "\n"
    sys.stderr.write(text)
    sys.stderr.flush()
