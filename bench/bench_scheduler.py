"""Microseconds per decision of the request scheduler, and its memory, at a cluster's full size.

A decision is everything a turn costs the scheduler: submit, its share of a fetch, the reports that its
arrival and its end cause on both engines, finish. A fixed number of turns is in flight; the oldest
ends when a new one comes.

    python bench/bench_scheduler.py --prefill 48 --decode 96 --in-flight 5000 --decisions 100000
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections import deque
from typing import get_args

import numpy as np

from kvtransfer.scheduler import Assignment, EngineReport, Limits, PathPolicy, Request, Scheduler

GPUS = 8


class Cluster:
    """Engines that report exactly, at every arrival and every end."""

    def __init__(self, prefill: int, decode: int, path: PathPolicy) -> None:
        self.scheduler = Scheduler(Limits(300_000, 200_000_000), path)
        self.tokens: dict[str, int] = {}
        self.requests: dict[str, int] = {}
        self.place: dict[str, tuple[str, str]] = {}
        for kind, nodes in (("pe", prefill), ("de", decode)):
            for node in range(nodes):
                for gpu in range(GPUS):
                    name, group = f"{kind}{node}.{gpu}", f"{kind}{node}"
                    self.tokens[name] = self.requests[name] = 0
                    self.place[name] = (group, group)
                    report = EngineReport(name, group, group, free_tokens=50_000_000)
                    if kind == "pe":
                        self.scheduler.add_prefill(report)
                    else:
                        self.scheduler.add_decode(report)

    def change(self, assignment: Assignment, sign: int) -> None:
        request = assignment.request
        for name in (assignment.prefill, assignment.decode):
            self.tokens[name] += sign * request.num_tokens
            self.requests[name] += sign
            group, node = self.place[name]
            report = EngineReport(
                name,
                group,
                node,
                self.requests[name],
                self.tokens[name],
                self.tokens[name] // 4,
                50_000_000 - self.tokens[name],
            )
            self.scheduler.report(report, frozenset((request.request_id,)))


def run(cluster: Cluster, decisions: int, in_flight: int, contexts: np.ndarray) -> float:
    """CPU seconds per decision, once ``in_flight`` turns are under way."""
    running: deque[Assignment] = deque()
    begin = time.process_time()
    for number in range(in_flight + decisions):
        if number == in_flight:
            begin = time.process_time()
        context = int(contexts[number % len(contexts)])
        cluster.scheduler.submit(Request(number, context, context - 429, 176))
        for assignment in cluster.scheduler.fetch():
            running.append(assignment)
            cluster.change(assignment, 1)
        if len(running) > in_flight:
            over = running.popleft()
            cluster.change(over, -1)
            cluster.scheduler.finish(over.request.request_id)
    assert cluster.scheduler.waiting == 0
    return (time.process_time() - begin) / decisions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", type=int, default=48, help="nodes of 8 GPUs")
    parser.add_argument("--decode", type=int, default=96)
    parser.add_argument("--in-flight", type=int, default=5000)
    parser.add_argument("--decisions", type=int, default=50_000)
    parser.add_argument("--path", choices=get_args(PathPolicy), default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    contexts = np.random.default_rng(1).integers(2_000, 64_000, 4096)
    cluster = Cluster(options.prefill, options.decode, options.path)
    seconds = run(cluster, options.decisions, options.in_flight, contexts)
    tracemalloc.start()
    traced = Cluster(options.prefill, options.decode, options.path)
    sizes = []
    for _ in range(2):
        fresh = [run_more(traced, options.in_flight, contexts)]
        sizes.append(tracemalloc.get_traced_memory()[0])
        del fresh
    result = {
        "engines": len(cluster.tokens),
        "in_flight": options.in_flight,
        "us_per_decision": seconds * 1e6,
        "mib_after_one_round": sizes[0] / 2**20,
        "mib_after_two_rounds": sizes[1] / 2**20,
    }
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:22} {value:.5g}")


_next = [10_000_000]


def run_more(cluster: Cluster, count: int, contexts: np.ndarray) -> None:
    """``count`` turns that all come and all go."""
    running = []
    for i in range(count):
        _next[0] += 1
        context = int(contexts[i % len(contexts)])
        cluster.scheduler.submit(Request(_next[0], context, context - 429, 176))
        for assignment in cluster.scheduler.fetch():
            running.append(assignment)
            cluster.change(assignment, 1)
    for assignment in running:
        cluster.change(assignment, -1)
        cluster.scheduler.finish(assignment.request.request_id)


if __name__ == "__main__":
    main()
