"""The house: includes and imports follow the arrows, and the checked-in stub tells the truth."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import kvtransfer._core as core

ROOT = Path(__file__).parents[2]

# Folder -> folders it may include from (docs/architecture.md).
CPP = {
    "base": set(),
    "layout": {"base"},
    "memory": {"base", "layout"},
    "device": {"base", "layout", "memory"},
    "io": {"base", "memory"},
    "store": {"base", "layout", "memory", "io"},
    "transport": {"base", "memory"},
    "stream": {"base", "layout", "memory", "device", "transport"},
    "traffic": {"base", "layout", "memory", "device", "io", "store", "transport", "stream"},
}
PUBLIC = {
    "error": "base",
    "block_encoding": "layout",
    "block_layout": "layout",
    "paged_cache": "layout",
    "memory_region": "memory",
    "buffer_pool": "memory",
    "io_queue": "io",
    "block_store": "store",
    "link": "transport",
    "work_ring": "transport",
    "verbs": "transport",
    "layer_stream": "stream",
    "traffic_manager": "traffic",
}
PYTHON = {
    "scheduler": {"errors"},
    "workload": {"errors"},
    "analysis": {"errors", "workload"},
    "sim": {"errors", "workload", "analysis", "scheduler", "_fluid"},
    "models": {"errors", "keys", "layout", "memory"},
    "engine": {
        "errors",
        "keys",
        "layout",
        "memory",
        "models",
        "scheduler",
        "store",
        "stream",
        "transport",
        "workload",
    },
}


@pytest.mark.parametrize("folder", CPP)
def test_includes_follow_the_arrows(folder: str) -> None:
    for file in (ROOT / "src" / folder).glob("*.*"):
        for name in re.findall(r'#include "([^"]+)"', file.read_text()):
            top, rest = name.split("/", 1)
            source = PUBLIC[rest.removesuffix(".h")] if top == "kvtransfer" else top
            assert source == folder or source in CPP[folder], f"{file.name} includes {name}"


def test_public_headers_are_all_known() -> None:
    assert {f.stem for f in (ROOT / "include" / "kvtransfer").glob("*.h")} == set(PUBLIC)


@pytest.mark.parametrize("package", PYTHON)
def test_imports_follow_the_arrows(package: str) -> None:
    for file in (ROOT / "kvtransfer" / package).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvtransfer."):
                top = node.module.split(".")[1]
                assert top == package or top in PYTHON[package], f"{file.name}: {node.module}"


def test_the_scheduler_is_pure() -> None:
    for file in (ROOT / "kvtransfer" / "scheduler").glob("*.py"):
        names = {
            alias.name.split(".")[0]
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert not names & {"time", "threading", "socket", "zmq", "os", "random"}, file.name


def test_the_stub_names_exactly_what_the_module_has() -> None:
    tree = ast.parse((ROOT / "kvtransfer" / "_core.pyi").read_text())
    stub = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    real = {n for n in dir(core) if not n.startswith("_")}
    assert set(stub) == real
    for name, node in stub.items():
        if isinstance(node, ast.ClassDef):
            members = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            members |= {
                n.target.id
                for n in node.body
                if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            }
            public = {m for m in vars(getattr(core, name)) if not m.startswith("_")}
            public -= {"name", "value"}
            wanted = {m for m in members if not m.startswith("_")} - {"name", "value"}
            assert wanted == public, name
