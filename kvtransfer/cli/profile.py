"""``kvtransfer profile``: measures what the scheduler's numbers are fitted from."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from kvtransfer.scheduler import AttentionTimeModel

SHAPES = ((0, 64), (0, 256), (0, 768), (512, 64), (512, 256), (1536, 16), (1536, 128), (1536, 512))
REPEATS = 3


def profile(
    model: str = "tiny",
    dtype: str = "float32",
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
) -> None:
    """Time forwards of (cached, new) shapes on one core and fit the attention-time model.

    Prints the fit, beta (tokens one engine processes in 5 s) and the error of the fit. The file
    written by --json is what `kvtransfer replay --profile` reads.
    """
    import numpy as np
    import torch

    from kvtransfer.engine.sequences import ResidentSequence
    from kvtransfer.models import SequenceSlice, load_model

    torch.set_num_threads(1)
    loaded = load_model(model, dtype)
    runner = loaded.runner()
    arena = loaded.arena(loaded.num_layers, 2176)
    span = arena.allocate(2176)
    assert span is not None
    sequence = ResidentSequence(arena, span)
    samples = []
    for cached, new in SHAPES:
        ids = (np.arange(new) % loaded.vocab_size).astype(np.uint32)
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            runner.forward([SequenceSlice(sequence, cached, ids)])
            times.append(time.perf_counter() - begin)
        samples.append((cached, new, sorted(times)[REPEATS // 2]))
    fit = AttentionTimeModel.fit(samples)
    errors = [abs(fit.seconds([(c, n)]) / t - 1) for c, n, t in samples]
    result = {
        "model": model,
        "time_fixed_s": fit.fixed_s,
        "time_per_token_s": fit.per_token_s,
        "time_per_pair_s": fit.per_pair_s,
        "beta": max(int(5.0 / max(fit.per_token_s, 1e-9)), 1),
    }
    for cached, new, seconds in samples:
        print(
            f"cached {cached:5d}  new {new:4d}  measured {seconds * 1e3:8.2f} ms  "
            f"fit {fit.seconds([(cached, new)]) * 1e3:8.2f} ms"
        )
    print(f"median error {sorted(errors)[len(errors) // 2]:.1%}")
    print(json.dumps(result, indent=2))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n")
