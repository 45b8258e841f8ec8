"""What the memory tier and prefetching at the end of a turn are worth on recorded think times.

Sessions of a trace (weka_claude_code) run side by side over one engine's storage path. Each turn
loads its prefix, then its tool runs for the recorded think time (divided by --speed-up; the storage
cap and the bytes of a block are small likewise), then the next turn follows. Five ways on the same
trace: no tier; a tier for half or all of the blocks that keeps what was read twice; the same with
the finished turn's blocks staged.

    python bench/bench_prefetch.py TRACE --sessions 6 --turns 12
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from kvtransfer import BlockLayout, BlockStore, TrafficManager, chain_keys, make_pool
from kvtransfer.workload import TraceSession, read_trace

LAYOUT = BlockLayout(4, 64, [64])  # 16 KiB a block, beside DeepSeek-V3.2's 2.6 MiB
ROOT = bytes(32)


def run(
    sessions: list[TraceSession], turns: int, cap: int, speed_up: float, memory: int, stage: bool
) -> tuple[list[float], dict[str, int]]:
    longest = max(len(t.block_ids) for s in sessions for t in s.turns[:turns])
    pool = make_pool(LAYOUT, longest * len(sessions) + 16)
    times: list[float] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = BlockStore(folder, ROOT, LAYOUT)
        manager = TrafficManager(
            store=store,
            pool=pool,
            device=None,
            layout=LAYOUT,
            memory_blocks=memory,
            bytes_per_second={"storage_read": cap},
        )

        def session(index: int, trace: TraceSession) -> None:
            slots = pool.acquire(longest)
            assert slots is not None
            for turn in trace.turns[:turns]:
                tokens = np.repeat(np.asarray(turn.block_ids, np.uint32), 64) * 64 + index * 7919
                keys = chain_keys(
                    ROOT, tokens + np.tile(np.arange(64, dtype=np.uint32), len(turn.block_ids)), 64
                )
                hit = store.lookup(keys, ROOT)
                begin = time.perf_counter()
                ticket = manager.load(keys=keys[:hit], parent=ROOT, slots=slots[:hit])
                assert ticket.wait(120)
                assert ticket.blocks == hit, ticket.error
                if hit:
                    times.append(time.perf_counter() - begin)
                manager.persist(keys=keys, parent=ROOT, slots=slots[: len(keys)]).wait(120)
                if stage:
                    manager.prefetch(keys=keys[:memory], parent=ROOT)
                time.sleep(turn.think_s / speed_up)
            pool.release(slots)

        threads = [threading.Thread(target=session, args=(i, s)) for i, s in enumerate(sessions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return times, manager.memory_tier_stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--cap-mbps", type=float, default=150.0, help="storage reads")
    parser.add_argument("--speed-up", type=float, default=100.0)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    sessions = [s for s in read_trace(options.trace) if len(s.turns) >= options.turns]
    sessions = sessions[: options.sessions]
    blocks = max(len(t.block_ids) for s in sessions for t in s.turns[: options.turns])
    thinks = [t.think_s for s in sessions for t in s.turns[: options.turns]]
    print(
        f"{len(sessions)} sessions x {options.turns} turns, up to {blocks} blocks a prompt, think "
        f"median {statistics.median(thinks):.1f} s mean {statistics.mean(thinks):.1f} s"
    )
    total = len(sessions) * blocks
    cases = {
        "no tier": (0, False),
        "tier for half": (total // 2, False),
        "half, staged": (total // 2, True),
        "tier for all": (total, False),
        "all, staged": (total, True),
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in cases}
    for _ in range(options.repeats):
        for name, (memory, stage) in cases.items():
            cap = int(options.cap_mbps * 1e6)
            times, stats = run(sessions, options.turns, cap, options.speed_up, memory, stage)
            asked = max(stats["hits"] + stats["misses"], 1)
            found[name].append(
                (statistics.mean(times), statistics.median(times), stats["hits"] / asked)
            )
    base = statistics.median(mean for mean, _, _ in found["no tier"])
    for name, values in found.items():
        mean, middle, hits = (statistics.median(column) for column in zip(*values, strict=True))
        print(
            f"{name:15} load mean {1e3 * mean:7.1f} ms, median {1e3 * middle:7.1f} ms, "
            f"{base / mean:5.2f}x, {hits:5.1%} of blocks from memory"
        )


if __name__ == "__main__":
    main()
