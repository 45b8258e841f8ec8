"""Writes the seeds of block_file_fuzz: one right input for each parser, and near misses."""

from __future__ import annotations

import sys
from pathlib import Path

HEX = "0123456789abcdef" * 4
MANIFEST = f"""kvtransfer block store, format 2
namespace {HEX}
block_tokens 8
layers 3 x 64 32
layers 1 x 8
"""
SEEDS = {
    "block-right": b"\0",
    "block-magic": b"\0\0\0\4KVTX",
    "block-version": b"\0\0\x08\4\3\0\0\0",
    "block-checksum": b"\0\0\x90\x08" + bytes(8),
    "block-payload": b"\0\x10\0\4abcd",
    "sealed-version": b"\3\0\x08\4\3\0\0\0",
    "sealed-layers": b"\3\0\x80\4\xff\xff\xff\xff",
    "sealed-tokens": b"\3\0\x88\4\xff\xff\xff\xff",
    "name-right": b"\1" + f"{HEX}-{HEX}.kvb".encode(),
    "name-case": b"\1" + f"{HEX.upper()}-{HEX}.kvb".encode(),
    "manifest-right": b"\2" + MANIFEST.encode(),
    "manifest-layers": b"\2" + MANIFEST.replace("3 x", "4294967296 x").encode(),
}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in SEEDS.items():
        (folder / name).write_bytes(data)
