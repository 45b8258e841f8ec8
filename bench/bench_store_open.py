"""How long a store with very many blocks takes to open, with cold and warm directories.

Makes that many sparse files of the right size and name, drops the kernel's caches if it
may, and opens the store; reports seconds and the memory of this process per block.

    python bench/bench_store_open.py --blocks 1000000 --folder DISK
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from kvtransfer import BlockLayout, BlockStore

LAYOUT = BlockLayout(2, 8, [64])
ROOT = bytes(32)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def drop_caches() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        store = BlockStore(folder, ROOT, LAYOUT)
        made: set[str] = set()
        parent = ROOT
        rng = np.random.default_rng(1)
        for i in range(options.blocks):
            key = rng.bytes(32)
            path = store.path_of(key, parent)
            directory = path[: path.rindex("/")]
            if directory not in made:
                made.add(directory)
                os.makedirs(directory, exist_ok=True)
            fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
            os.ftruncate(fd, store.file_bytes)
            os.close(fd)
            parent = ROOT if i % 200 == 199 else key
        del store
        for name in ("cold", "warm", "warm"):
            dropped = name == "cold" and drop_caches()
            before, begin = resident_bytes(), time.perf_counter()
            store = BlockStore(folder, ROOT, LAYOUT)
            seconds = time.perf_counter() - begin
            grown = (resident_bytes() - before) / max(store.stats()["blocks"], 1)
            note = "" if dropped or name == "warm" else " (caches could not be dropped)"
            print(
                f"{name}: {store.stats()['blocks']} blocks in {seconds:.2f} s, "
                f"{grown:.0f} B a block more resident{note}"
            )
            del store


if __name__ == "__main__":
    main()
