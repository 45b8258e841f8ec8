"""Posts 640 small writes in lists of the given length: ``post_batches.py BATCH``."""

import sys

import numpy as np

from kvtransfer.memory import MemoryRegion
from kvtransfer.transport import VerbsDomain, VerbsOptions, WorkRing

batch = int(sys.argv[1])
region = MemoryRegion(1 << 16)
here = VerbsDomain(options=VerbsOptions(device="rxe0"), regions=[region])
there = VerbsDomain(options=VerbsOptions(device="rxe1"), regions=[MemoryRegion(1 << 16)])
a, b = here.make_endpoint(name="a"), there.make_endpoint(name="b")
blob_a, blob_b = a.blob(), b.blob()
other, ring = b.connect(blob_a), a.connect(blob_b, batch)
rows = np.zeros(batch, WorkRing.DTYPE)
rows["length"] = 64
for _ in range(640 // batch):
    assert ring.post(rows) == batch
    retired = 0
    while retired < batch:
        retired += len(ring.poll(1.0))
assert ring.counters["doorbells"] == 640 // batch
