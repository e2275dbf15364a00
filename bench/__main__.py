"""``python -m bench``: every figure the README quotes, measured on this machine."""

from __future__ import annotations

import argparse

from bench.footprint import growth_line, import_line, memory_line
from bench.leak import leak_line
from bench.loading import loading_lines
from bench.overhead import overhead_lines
from bench.replay import replay_line


def main() -> None:
    """Print the figures, one line each."""
    arguments = argparse.ArgumentParser(prog="bench", description=__doc__)
    arguments.add_argument("--rounds", type=int, default=10, help="blocks of each kind for the overhead")
    arguments.add_argument("--steps", type=int, default=1_000_000, help="steps of the growth run")
    arguments.add_argument("--events", type=int, default=1_000_000, help="events of the replayed trace")
    chosen = arguments.parse_args()
    for line in overhead_lines(chosen.rounds):
        print(line, flush=True)
    print(*loading_lines(10 * chosen.rounds), sep="\n", flush=True)
    print(import_line(), flush=True)
    print(memory_line(), flush=True)
    print(leak_line(max(1, chosen.rounds // 3)), flush=True)
    print(growth_line(chosen.steps), flush=True)
    print(replay_line(chosen.events), flush=True)


if __name__ == "__main__":
    main()
