"""``kvtransfer bench store``: the block store beside the device's limit and what people have."""

from __future__ import annotations

import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvtransfer.cli.bench_store_peers import Fio, Meter, PlainFiles, TorchFiles
from kvtransfer.errors import InvalidArgument

if TYPE_CHECKING:
    import numpy as np

    from kvtransfer import BlockLayout, BlockStore, BufferPool, TrafficManager
    from kvtransfer.transport import Ticket

__all__ = ["store"]

# (layers, bytes per token of a layer) for 64 tokens. DeepSeek-V3.2: MLA in FP8 and its indexer;
# Qwen2.5-32B: 8 KV heads of 128, K and V in 16 bits.
SHAPES = {
    "256KiB": (16, 256),
    "1MiB": (32, 512),
    "2.6MiB": (61, 700),
    "16.8MiB": (64, 4096),
}
CHAIN = 16
PAUSE_S = 0.3


@dataclass
class Sample:
    """One measurement of one program."""

    gb_per_s: float
    cpu_s_per_gb: float
    p50_ms: float
    p99_ms: float


@dataclass
class Row:
    """One size, direction and program; a sample per repeat."""

    size: str
    mode: str
    program: str
    samples: list[Sample] = field(default_factory=list)
    calls_per_block: float | None = None

    def median(self, name: str) -> float:
        return float(statistics.median(getattr(sample, name) for sample in self.samples))


def store(
    folder: Annotated[Path, typer.Option(help="where to; /dev/shm is a fast device")] = Path("out"),
    size: Annotated[str, typer.Option(help=f"of {', '.join(SHAPES)}")] = ",".join(SHAPES),
    mode: Annotated[str, typer.Option(help="of read, write")] = "read,write",
    pairs: Annotated[int, typer.Option(help="interleaved repeats")] = 15,
    megabytes: Annotated[int, typer.Option(help="MB moved by one measurement")] = 256,
    depth: Annotated[int, typer.Option(help="operations in flight")] = 32,
    backend: Annotated[str, typer.Option(help="of auto, uring, threads")] = "auto",
    peers: Annotated[str, typer.Option(help="of fio, plain, torch")] = "fio,plain",
    huge: Annotated[
        bool, typer.Option(help="our buffers in huge pages where they can be had")
    ] = True,
    verify: Annotated[bool, typer.Option(help="also measure with checksums on")] = True,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """GB/s, CPU s/GB, latency and system calls per block, interleaved with the peers.

    `fio` (io_uring, registered buffers, O_DIRECT, the same depth) is what the device and the kernel
    give; it reads the very files of the store. `plain` is open, preadv or pwrite and close in a
    Python thread; `torch` is torch.save and torch.load. Files are not in the page cache when they
    are read.
    """
    if backend not in ("auto", "uring", "threads"):
        raise InvalidArgument(f"--backend must be of auto, uring, threads, got {backend!r}")
    if pairs < 1 or megabytes < 1 or not 1 <= depth <= 4096:
        raise InvalidArgument("--pairs and --megabytes must be at least 1, --depth in 1..4096")
    sizes, modes = _words("size", size, list(SHAPES)), _words("mode", mode, ["read", "write"])
    programs = _words("peers", peers, ["fio", "plain", "torch"]) if peers else []
    if "fio" in programs and shutil.which("fio") is None:
        raise InvalidArgument("bench store: fio is not installed; install it or leave it out")
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with (
        Progress(transient=True) as progress,
        tempfile.TemporaryDirectory(prefix="bench-store-", dir=folder) as scratch,
    ):
        task = progress.add_task("bench store", total=len(sizes) * len(modes) * pairs)
        for name in sizes:
            with _bench(Path(scratch), name, megabytes, depth, backend, huge) as bench:
                for kind in modes:
                    cases = bench.cases(kind, programs, verify)
                    new = {case: Row(name, kind, case) for case in cases}
                    rows += new.values()
                    for _ in range(pairs):
                        # In another order each time, and rested: clouds lend their disks' bursts.
                        for case in random.sample(list(cases), len(cases)):
                            time.sleep(PAUSE_S)
                            new[case].samples.append(cases[case]())
                        progress.advance(task)
                    for case, run in cases.items():
                        calls = None if case == "fio" else bench.meter.count_calls(run)
                        new[case].calls_per_block = calls and calls / bench.count
    _print(rows, folder)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows]))


def _words(option: str, text: str, known: list[str]) -> list[str]:
    words = text.split(",")
    for word in words:
        if word not in known:
            raise InvalidArgument(f"--{option} must be of {', '.join(known)}, got {word!r}")
    return words


@dataclass
class _Bench:
    """One block size: our store and the peers' files, under one folder."""

    folder: Path
    layout: BlockLayout
    pool: BufferPool
    count: int
    depth: int
    backend: str
    keys: np.ndarray
    root: bytes
    meter: Meter = field(default_factory=Meter)

    def cases(
        self, mode: str, programs: list[str], verify: bool
    ) -> dict[str, Callable[[], Sample]]:
        peers: dict[str, Callable[[], Fio | PlainFiles]] = {
            "fio": lambda: Fio(
                self.folder / f"fio-{mode}",
                self.file_bytes,
                self.count,
                self.depth,
                sorted((self.folder / "store").rglob("*.kvb")),
            ),
            "plain": lambda: PlainFiles(
                self.folder / "plain", self.file_bytes, self.count, self.meter
            ),
            "torch": lambda: TorchFiles(
                self.folder / "torch", self.file_bytes, self.count, self.meter
            ),
        }
        cases: dict[str, Callable[[], Sample]] = {}
        if mode == "write":
            cases["kvtransfer"] = self.write
        else:
            self.write()
            if verify:
                cases["kvtransfer"] = lambda: self.read(True)
            cases["no checksums"] = lambda: self.read(False)
        for name in programs:
            peer = peers[name]()
            cases[name] = self._sampled(peer.write if mode == "write" else peer.read)
        return cases

    @property
    def file_bytes(self) -> int:
        return self.pool.slot_bytes

    def _sampled(
        self, run: Callable[[], tuple[float, float, float, float]]
    ) -> Callable[[], Sample]:
        total = self.count * self.file_bytes

        def sample() -> Sample:
            seconds, cpu, p50, p99 = run()
            return Sample(total / seconds / 1e9, cpu / (total / 1e9), 1e3 * p50, 1e3 * p99)

        return sample

    def read(self, verify: bool) -> Sample:
        import numpy as np

        order = np.random.default_rng().permutation(self.count // CHAIN)
        with self._manager(verify) as (manager, store):
            return self._sampled(
                lambda: (
                    *self._drive(order, manager.load),
                    store.read_latency(0.5),
                    store.read_latency(0.99),
                )
            )()

    def write(self) -> Sample:
        import numpy as np

        shutil.rmtree(self.folder / "store", ignore_errors=True)
        order = np.arange(self.count // CHAIN)
        with self._manager(True) as (manager, store):
            for i, key in enumerate(self.keys):  # a store that has been used has its directories
                parent = self.keys[i - 1].tobytes() if i % CHAIN else self.root
                Path(store.path_of(key.tobytes(), parent)).parent.mkdir(parents=True, exist_ok=True)
            return self._sampled(
                lambda: (
                    *self._drive(order, manager.persist),
                    store.write_latency(0.5),
                    store.write_latency(0.99),
                )
            )()

    @contextmanager
    def _manager(self, verify: bool) -> Iterator[tuple[TrafficManager, BlockStore]]:
        from kvtransfer import BlockStore, TrafficManager
        from kvtransfer._core import IoBackend

        store = BlockStore(
            str(self.folder / "store"), self.root, self.layout, verify_checksums=verify
        )
        manager = TrafficManager(
            store=store,
            pool=self.pool,
            device=None,
            layout=self.layout,
            io_backend=getattr(IoBackend, self.backend),
            io_depth=self.depth,
        )
        yield manager, store
        del manager

    def _drive(self, order: np.ndarray, submit: Callable[..., Ticket]) -> tuple[float, float]:
        """Every chain once, with twice the queue's depth submitted; (seconds, CPU seconds)."""
        import numpy as np

        window = self.pool.num_slots // CHAIN
        tickets: list[Ticket] = []

        def move() -> None:
            for i, chain in enumerate(order):
                if i >= window:
                    tickets[i - window].wait(60)
                slots = np.arange(CHAIN, dtype=np.uint32) + CHAIN * (i % window)
                keys = self.keys[CHAIN * chain : CHAIN * (chain + 1)]
                tickets.append(submit(keys=keys, parent=self.root, slots=slots))
            for ticket in tickets[-window:]:
                ticket.wait(60)

        seconds, cpu = self.meter.measure(move)
        if any(ticket.blocks != CHAIN for ticket in tickets):
            raise InvalidArgument(f"bench store: not all blocks were moved: {tickets[-1].error}")
        return seconds, cpu


@contextmanager
def _bench(
    scratch: Path, name: str, megabytes: int, depth: int, backend: str, huge: bool
) -> Iterator[_Bench]:
    import numpy as np

    from kvtransfer import BlockLayout, chain_keys, make_pool
    from kvtransfer.memory import HugePages, RegionKind

    layers, layer_bytes = SHAPES[name]
    layout = BlockLayout(layers, 64, [layer_bytes])
    slots = max(2 * depth // CHAIN, 2) * CHAIN
    pages = HugePages.auto if huge else HugePages.off
    kind = RegionKind.anonymous if huge else RegionKind.shared
    pool = make_pool(layout, slots, kind, pages)
    taken = pool.acquire(slots)
    assert taken is not None
    data = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
    array = pool.region.array()
    for at in range(0, len(array), len(data)):
        array[at : at + len(data)] = data[: len(array) - at]
    count = max(round(megabytes * 1e6 / layout.full_block_bytes / CHAIN), 1) * CHAIN
    root = bytes(32)
    keys = np.concatenate(
        [
            chain_keys(root, np.arange(CHAIN * 64, dtype=np.uint32) + 1_000_000 * i, 64)
            for i in range(count // CHAIN)
        ]
    )
    folder = scratch / name
    folder.mkdir()
    try:
        yield _Bench(folder, layout, pool, count, depth, backend, keys, root)
    finally:
        pool.release(taken)
        shutil.rmtree(folder)


def _print(rows: list[Row], folder: Path) -> None:
    table = Table(
        *("size", "mode", "program", "GB/s", "min-max", "of fio", "quartiles", "CPU s/GB"),
        *("p50 ms", "p99 ms", "calls/block"),
        title=f"files in {folder}",
    )
    for row in rows:
        speeds = [sample.gb_per_s for sample in row.samples]
        limit = [r for r in rows if (r.size, r.mode, r.program) == (row.size, row.mode, "fio")]
        cells = ["", ""]
        if limit and row is not limit[0]:
            ratios = [s / x.gb_per_s for s, x in zip(speeds, limit[0].samples, strict=True)]
            cells[0] = f"{statistics.median(ratios):.2f}"
            if len(ratios) > 1:
                low, _, high = statistics.quantiles(ratios, n=4)
                cells[1] = f"{low:.2f}-{high:.2f}"
        table.add_row(
            *(row.size, row.mode, row.program, f"{statistics.median(speeds):.2f}"),
            *(f"{min(speeds):.2f}-{max(speeds):.2f}", *cells),
            *(f"{row.median('cpu_s_per_gb'):.3f}", f"{row.median('p50_ms'):.2f}"),
            f"{row.median('p99_ms'):.2f}",
            "" if row.calls_per_block is None else f"{row.calls_per_block:.1f}",
        )
    console = Console()
    wide = console if console.is_terminal else Console(width=130)
    wide.print(table)
