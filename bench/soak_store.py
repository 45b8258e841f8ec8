"""A randomised soak of the block store: three processes on one directory, faults on, the cap exceeded.

Each process loads random chains of a universe that is ten times the cap, compares every byte with what
the key stands for, and stores what was missing. Meanwhile files are damaged, cut, removed and swapped,
temporaries of dead writers left behind, and processes killed, stopped and started again. At the end
every block that is left must verify and the accounting must equal the directory.

    python bench/soak_store.py --minutes 30
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from kvtransfer import BlockLayout, BlockStore, TrafficManager, chain_keys, make_pool

LAYOUT = BlockLayout(4, 64, [256, 256])
ROOT = bytes(32)
CHAIN = 25
PROCESSES = 3
CAP_BLOCKS = 400
CHAINS = 10 * CAP_BLOCKS // CHAIN
COUNTS = ("loads", "blocks_verified", "short_loads", "blocks_stored", "wrong_bytes")


def keys_of(chain: int) -> np.ndarray:
    return chain_keys(ROOT, np.arange(CHAIN * 64, dtype=np.uint32) + 100_000 * chain, 64)


def content(key: np.ndarray) -> np.ndarray:
    """What a block holds is a function of its key, as in a deterministic engine."""
    seed = int.from_bytes(key.tobytes()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, LAYOUT.full_block_bytes, np.uint8)


def open_store(root: str) -> BlockStore:
    file_bytes = make_pool(LAYOUT, 1).slot_bytes
    return BlockStore(
        root, ROOT, LAYOUT, max_bytes=CAP_BLOCKS * file_bytes, stale_temporary_seconds=5
    )


def work(root: str, stop: Event, counts: dict[str, Synchronized[int]]) -> None:
    store = open_store(root)
    pool = make_pool(LAYOUT, 2 * CHAIN)
    manager = TrafficManager(store=store, pool=pool, device=None, layout=LAYOUT, io_depth=16)
    rng = random.Random(os.getpid() + time.time_ns())
    slots = pool.acquire(CHAIN)
    assert slots is not None
    views = [
        pool.region.array()[o : o + LAYOUT.full_block_bytes] for o in pool.payload_offsets(slots)
    ]

    def add(name: str, value: int) -> None:
        with counts[name].get_lock():
            counts[name].value += value

    while not stop.is_set():
        # Some chains are hot, most are not.
        chain = min(int(rng.expovariate(6 / CHAINS)), CHAINS - 1)
        keys = keys_of(chain)
        hit = store.lookup(keys, ROOT)
        ticket = manager.load(
            keys=keys[:hit], parent=ROOT, slots=slots[:hit], parts=rng.choice([1, 2]), timeout_s=60
        )
        assert ticket.wait(60), "a load that never ends"
        # A shorter result is legal; with several parts its blocks may not be whole, so start over.
        good = ticket.blocks
        if good < hit:
            add("short_loads", 1)
            good = store.get(keys[:good], ROOT, pool, slots[:good])
        add("loads", 1)
        for view, key in zip(views[:good], keys[:good], strict=True):
            if not np.array_equal(view, content(key)):
                add("wrong_bytes", 1)
                print(f"WRONG BYTES in chain {chain}", file=sys.stderr, flush=True)
        add("blocks_verified", good)
        for view, key in zip(views[good:], keys[good:], strict=True):
            view[:] = content(key)
        ticket = manager.persist(keys=keys, parent=ROOT, slots=slots)
        assert ticket.wait(60), "a persist that never ends"
        add("blocks_stored", sum(ticket.fresh))


def disturb(root: str, rng: random.Random) -> str:
    """One fault in the directory; returns its name."""
    files = list(Path(root).rglob("*.kvb"))
    if not files:
        return "none"
    path = rng.choice(files)
    kind = rng.choice(["flip", "cut", "remove", "swap", "temporary", "extend", "zero"])
    try:
        if kind == "flip":
            with path.open("r+b") as file:
                file.seek(rng.randrange(path.stat().st_size))
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))
        elif kind == "cut":
            os.truncate(path, rng.randrange(path.stat().st_size))
        elif kind == "extend":
            os.truncate(path, path.stat().st_size + 4096)
        elif kind == "zero":
            path.write_bytes(bytes(path.stat().st_size))
        elif kind == "remove":
            path.unlink()
        elif kind == "swap":
            os.replace(rng.choice(files), path)
        else:
            (path.parent / f".tmp-dead-{rng.random()}").write_bytes(b"half a block")
    except FileNotFoundError:
        pass  # evicted meanwhile
    return kind


def soak(seconds: float, root: str, say: bool) -> dict[str, int]:
    context = multiprocessing.get_context("spawn")
    counts = {name: context.Value("q", 0) for name in COUNTS}
    stop = context.Event()
    open_store(root)

    def start() -> multiprocessing.process.BaseProcess:
        process = context.Process(target=work, args=(root, stop, counts))
        process.start()
        return process

    workers = [start() for _ in range(PROCESSES)]
    rng = random.Random(1)
    faults: dict[str, int] = {}
    most = 0
    deadline = time.monotonic() + seconds
    next_word = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(rng.uniform(0.02, 0.2))
        kind = disturb(root, rng)
        if rng.random() < 0.05:
            victim = rng.randrange(PROCESSES)
            pid = workers[victim].pid
            assert pid is not None
            kind = rng.choice(["kill", "stop"])
            if kind == "kill":
                os.kill(pid, signal.SIGKILL)
                workers[victim].join()
                workers[victim] = start()
            else:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(rng.uniform(0, 0.5))
                os.kill(pid, signal.SIGCONT)
        faults[kind] = faults.get(kind, 0) + 1
        most = max(most, sum(1 for _ in Path(root).rglob("*.kvb")))
        died = [w for w in workers if w.exitcode not in (None, -signal.SIGKILL)]
        if died:
            raise SystemExit(f"a worker died by itself: {died}")
        if say and time.monotonic() > next_word:
            next_word += 60
            print({n: c.value for n, c in counts.items()}, "most blocks", most, flush=True)
    stop.set()
    for worker in workers:
        worker.join(90)
        if worker.exitcode != 0:
            raise SystemExit(f"a worker ended with {worker.exitcode}")
    result = {name: count.value for name, count in counts.items()}
    result |= {"faults": sum(faults.values()), "most_blocks": most, **faults}
    return result | check_end(root)


def check_end(root: str) -> dict[str, int]:
    """What is left verifies, and the accounting is that of the directory."""
    pool = make_pool(LAYOUT, CHAIN)
    slots = pool.acquire(CHAIN)
    assert slots is not None
    time.sleep(5.5)  # temporaries of the killed are stale then
    store = open_store(root)
    keys, parents, _ = store.list()
    wrong = 0
    for key, parent in zip(keys, parents, strict=True):
        if store.get(key[None], parent.tobytes(), pool, slots[:1]) == 1:
            at = int(pool.payload_offsets(slots[:1])[0])
            wrong += not np.array_equal(
                pool.region.array()[at : at + LAYOUT.full_block_bytes], content(key)
            )
    store.evict()
    files = list(Path(root).rglob("*.kvb"))
    stats = store.stats()
    return {
        "blocks_at_the_end": len(files),
        "accounted_at_the_end": stats["blocks"],
        "bytes_on_disk": sum(f.stat().st_size for f in files),
        "bytes_accounted": stats["bytes"],
        "cap": CAP_BLOCKS * store.file_bytes,
        "temporaries_left": len(list(Path(root).rglob(".tmp-*"))),
        "wrong_at_the_end": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--folder", default=None, help="where to; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = soak(60 * options.minutes, folder + "/store", say=True)
    for name, value in result.items():
        print(f"{name:24} {value}")
    ok = (
        result["wrong_bytes"] == result["wrong_at_the_end"] == result["temporaries_left"] == 0
        and result["blocks_at_the_end"] == result["accounted_at_the_end"]
        and result["bytes_on_disk"] == result["bytes_accounted"] <= result["cap"]
    )
    print("passed" if ok else "FAILED")
    sys.exit(not ok)


if __name__ == "__main__":
    main()
