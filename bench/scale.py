"""``python -m bench.scale``: from eight ranks to a thousand, measured on this machine; ten thousand, reckoned.

Takes about five minutes; ``--only`` names a part.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.scale_fleet import SCRAPE_SECONDS, FleetCost, measure_fleet, rank_lines
from bench.scale_node import NodeCost, living, measure_node, measure_training
from bench.scale_records import real_record

PARTS = ("node", "training", "fleet")
FLEET_SECONDS = 100.0
USUAL_SCRAPE_SECONDS = 15


def main() -> None:
    """Print the figures, one line each."""
    arguments = argparse.ArgumentParser(prog="bench.scale", description=__doc__)
    arguments.add_argument("--only", choices=PARTS, action="append", help="measure this part alone")
    arguments.add_argument("--ranks", type=int, default=1000, help="ranks of the fleet")
    chosen = arguments.parse_args()
    parts = chosen.only or PARTS
    with tempfile.TemporaryDirectory() as place:
        template = real_record(Path(place) / "real")
        if "node" in parts:
            for ranks in (8, 64):
                print(node_line(measure_node(template, Path(place) / f"node{ranks}", ranks)), flush=True)
        if "training" in parts:
            print(training_line(*measure_training(Path(place) / "noticed")), flush=True)
        if "fleet" in parts:
            with living(template, Path(place) / "one", 1, 10.0):
                lines = rank_lines(Path(place) / "one")
            cost = measure_fleet(lines, chosen.ranks, FLEET_SECONDS)
            print(fleet_line(cost), flush=True)
            slowest = ", ".join(f"{name} {1e3 * spent:.0f} ms" for name, spent in cost.slowest)
            print(f"  slowest rules: {slowest}", flush=True)
            for line in reckoned(cost, 10_000):
                print(line, flush=True)


def node_line(cost: NodeCost) -> str:
    """A node's daemon."""
    return (
        f"node, {cost.ranks} ranks: {cost.series} series; a scrape {1e3 * cost.scrape_seconds:.1f} ms, "
        f"{1e3 * cost.scrape_cpu_seconds:.1f} ms of the daemon's CPU; unasked {1e3 * cost.idle_cpu_seconds:.1f} ms a "
        f"second; resident {cost.resident_bytes / 1e6:.1f} MB, at most {cost.largest_bytes / 1e6:.1f} MB"
    )


def training_line(alone: float, alone_cpu: float, scraped: float, scraped_cpu: float) -> str:
    """A training, alone and scraped."""
    return (
        f"training: median step {1e6 * alone:.0f} us, its CPU {1e6 * alone_cpu:.0f} us; scraped twice a second "
        f"{1e6 * scraped:.0f} us, its CPU {1e6 * scraped_cpu:.0f} us: {100 * (scraped_cpu / alone_cpu - 1):+.1f} %"
    )


def fleet_line(cost: FleetCost) -> str:
    """A fleet's Prometheus."""
    how = f"scraped every {SCRAPE_SECONDS} s for {cost.seconds:.0f} s"
    return (
        f"fleet, {cost.ranks} ranks on {cost.targets} nodes, {how}: {cost.series} series, "
        f"{cost.series / cost.ranks:.0f} a rank; {cost.samples_a_second:.0f} samples a second; "
        f"{cost.resident_bytes / 1e6:.0f} MB resident; {cost.cpu_cores:.2f} cores; "
        f"all rules {cost.rule_seconds:.1f} s an evaluation, {rule_cpu_seconds(cost):.1f} s of CPU at most; "
        f"a scrape {1e3 * cost.scrape_seconds:.1f} ms"
    )


def rule_cpu_seconds(cost: FleetCost) -> float:
    """CPU time of an evaluation at most: all that the server used meanwhile, the scrapes included."""
    return cost.cpu_cores * max(SCRAPE_SECONDS, cost.rule_seconds)


def reckoned(cost: FleetCost, ranks: int) -> Iterator[str]:
    """The same for more ranks: everything grows with their number, samples also with the interval."""
    times = ranks / cost.ranks
    yield f"reckoned for {ranks} ranks, scraped every {USUAL_SCRAPE_SECONDS} s (times {times:.0f}):"
    yield f"  series: {cost.series} x {times:.0f} = {cost.series * times:,.0f}"
    rate = cost.series * times / USUAL_SCRAPE_SECONDS
    yield f"  samples a second: {cost.series * times:,.0f} / {USUAL_SCRAPE_SECONDS} = {rate:,.0f}"
    yield f"  memory: {cost.resident_bytes / 1e9:.2f} GB x {times:.0f} = {cost.resident_bytes * times / 1e9:.1f} GB"
    spent = rule_cpu_seconds(cost)
    yield f"  rules: {spent:.1f} s of CPU x {times:.0f} = {spent * times:.0f} s of CPU an evaluation, at most"
    disk = rate * 86400 * 15 * 1.5
    yield f"  disk: {rate:,.0f} samples x 86,400 s x 15 days x 1.5 bytes = {disk / 1e9:,.0f} GB"


if __name__ == "__main__":
    main()
