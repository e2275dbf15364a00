"""Work done in a forked child, as another user where one is named."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(work: Callable[[], object], uid: int | None = None) -> str:
    """Run this in a forked child, as another user where one is named; returns what it printed or raised."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "nothing"
        try:
            if uid is not None:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            answer = str(work())
        except (OSError, RuntimeError, AssertionError) as error:
            answer = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, answer.encode())
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answers:
        answer = answers.read().decode()
    os.waitpid(child, 0)
    return answer
