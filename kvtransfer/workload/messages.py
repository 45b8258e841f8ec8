"""Real text: OpenAI-style message lists as sessions, one turn per assistant message."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvtransfer.errors import WorkloadError
from kvtransfer.workload.sessions import Session, Turn

__all__ = ["byte_tokens", "read_messages"]

Encode = Callable[[str], list[int]]


def byte_tokens(text: str) -> list[int]:
    """One token a UTF-8 byte: for models without a tokenizer."""
    return list(text.encode())


def read_messages(
    path: str | Path, encode: Encode = byte_tokens, *, max_turns: int | None = None
) -> list[Session]:
    """Sessions of a JSON file: a list of message lists, or of objects with ``traj`` or
    ``messages``.

    Every assistant message is a turn: what comes before it is the prompt, as many tokens as it has
    are generated, and the next prompt holds the recorded message. Raises WorkloadError.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        items = json.loads(data)
    except (OSError, EOFError, ValueError) as error:
        raise WorkloadError(f"{path}: {error}") from error
    if not isinstance(items, list) or not items:
        raise WorkloadError(f"{path}: expected a list of conversations")
    sessions = []
    for index, item in enumerate(items):
        where = f"{path}: conversation {index}"
        messages = item
        if isinstance(item, dict):
            messages = item.get("traj") or item.get("messages")
        if not isinstance(messages, list) or not messages:
            raise WorkloadError(f"{where}: no list of messages (traj or messages)")
        session = _session(f"conversation-{index}", messages, encode, max_turns, where)
        if session.turns:
            sessions.append(session)
    return sessions


def _session(
    name: str, messages: list[Any], encode: Encode, max_turns: int | None, where: str
) -> Session:
    turns: list[Turn] = []
    so_far: list[int] = []
    kept = 0
    for index, message in enumerate(messages):
        if max_turns is not None and len(turns) == max_turns:
            break
        tokens = encode(_render(message, f"{where}: message {index}"))
        if message["role"] == "assistant" and len(so_far) > kept:
            new = np.array(so_far[kept:], np.uint32)
            turns.append(Turn(new, max(len(tokens), 1), kept))
            kept = len(so_far)
        so_far.extend(tokens)
    return Session(name, tuple(turns))


def _render(message: Any, where: str) -> str:
    """ChatML, with tool calls as their JSON."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise WorkloadError(f"{where}: not a message with a role")
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = json.dumps(content, sort_keys=True)
    if message.get("tool_calls"):
        content += json.dumps(message["tool_calls"], sort_keys=True)
    return f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"
