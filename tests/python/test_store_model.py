"""The store against a dictionary, by hypothesis: puts, damage, eviction, restarts, other writers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from slots import ROOT_KEY, read

from kvtransfer import BlockLayout, BlockStore, chain_keys, make_pool

LAYOUT = BlockLayout(3, 8, [40])
CHAINS = 4
LENGTH = 5
KEYS = [chain_keys(ROOT_KEY, np.arange(LENGTH * 8) + 1000 * chain, 8) for chain in range(CHAINS)]
chains = st.integers(0, CHAINS - 1)
blocks = st.integers(0, LENGTH - 1)


def content(chain: int, block: int) -> np.ndarray:
    """What a block holds is a function of its key, as in a deterministic engine."""
    seed = int.from_bytes(KEYS[chain][block].tobytes()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, LAYOUT.full_block_bytes, np.uint8)


class StoreMachine(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.pool = make_pool(LAYOUT, LENGTH)
        self.model: dict[tuple[int, int], bool] = {}  # True: whole, False: damaged
        self.store = self.reopen_store()

    def reopen_store(self) -> BlockStore:
        return BlockStore(self.folder.name, ROOT_KEY, LAYOUT)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def path(self, chain: int, block: int) -> Path:
        parent = ROOT_KEY if block == 0 else KEYS[chain][block - 1].tobytes()
        return Path(self.store.path_of(KEYS[chain][block].tobytes(), parent))

    def put_with(self, store: BlockStore, chain: int, count: int) -> None:
        slots = self.pool.acquire(count)
        assert slots is not None
        for i, offset in enumerate(self.pool.payload_offsets(slots)):
            data = content(chain, i)
            self.pool.region.array()[int(offset) : int(offset) + len(data)] = data
        assert store.put(KEYS[chain][:count], ROOT_KEY, self.pool, slots) == count
        self.pool.release(slots)
        for i in range(count):
            self.model.setdefault((chain, i), True)

    @rule(chain=chains, count=st.integers(1, LENGTH))
    def put(self, chain: int, count: int) -> None:
        self.put_with(self.store, chain, count)

    @rule(chain=chains, count=st.integers(1, LENGTH))
    def another_process_puts(self, chain: int, count: int) -> None:
        self.put_with(self.reopen_store(), chain, count)

    @rule(chain=chains)
    def get(self, chain: int) -> None:
        good = 0
        while good < LENGTH and self.model.get((chain, good)) is True:
            good += 1
        slots = self.pool.acquire(LENGTH)
        assert slots is not None
        assert self.store.get(KEYS[chain], ROOT_KEY, self.pool, slots) == good
        got = read(self.pool, slots, LAYOUT)
        for i in range(good):
            np.testing.assert_array_equal(got[i], content(chain, i))
        self.pool.release(slots)
        # All blocks are read at once, so every damaged one of the chain has been seen and removed.
        for i in range(LENGTH):
            if self.model.get((chain, i)) is False and not self.path(chain, i).exists():
                del self.model[chain, i]

    @rule(chain=chains, block=blocks, at=st.integers(0, 4095 + 960), bit=st.integers(0, 7))
    def damage(self, chain: int, block: int, at: int, bit: int) -> None:
        path = self.path(chain, block)
        used = 152 + 8 * LAYOUT.num_layers
        if (chain, block) not in self.model or used <= at < 4096:
            return
        raw = bytearray(path.read_bytes())
        if self.model[chain, block]:  # a second flip could undo the first
            raw[at] ^= 1 << bit
            path.write_bytes(raw)
            self.model[chain, block] = False

    @rule(chain=chains, block=blocks)
    def remove(self, chain: int, block: int) -> None:
        self.path(chain, block).unlink(missing_ok=True)
        self.model.pop((chain, block), None)
        self.store.rescan()

    @rule()
    def restart(self) -> None:
        self.store = self.reopen_store()

    @invariant()
    def every_slot_is_free_between_operations(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.available == self.pool.num_slots

    @invariant()
    def files_are_exactly_what_the_model_knows(self) -> None:
        if hasattr(self, "folder"):
            files = {p.name for p in Path(self.folder.name).rglob("*.kvb")}
            assert files == {self.path(*place).name for place in self.model}


TestStoreModel = StoreMachine.TestCase
TestStoreModel.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
