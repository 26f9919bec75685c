"""The nursery: one process that has imported the heavy libraries, and forks a role in milliseconds.

Line protocol over its own stdin and stdout, JSON: `{"argv": [...], "log": path}` is answered by `{"pid": n}`; every
end by `{"pid": n, "code": c}`. It ends, and its children with it, when its stdin closes. It starts no thread and no
engine before it forks. A role started by hand (`python -m epdlab encoder`) runs the same code without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import traceback
from typing import Any

PRELOADED = ("torch", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "aiohttp.web", "zmq.asyncio")


def main() -> None:
    """Serve until stdin closes, or nobody reads any more."""
    with contextlib.suppress(BrokenPipeError):
        _serve()


def _serve() -> None:
    sys.stdout.flush()
    replies = os.dup(1)
    os.dup2(2, 1)
    _preload()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pending = b""
    while True:
        ready, _, _ = select.select([0, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            _report_ends(replies)
        if 0 in ready:
            chunk = os.read(0, 65536)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                _reply(replies, {"pid": _fork(json.loads(line), [replies, wake_read, wake_write])})


def _preload() -> None:
    for name in PRELOADED:
        __import__(name)
    from .. import cli, roles  # noqa: F401


def _reply(descriptor: int, message: dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(message).encode() + b"\n")


def _report_ends(replies: int) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _reply(replies, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _fork(order: dict[str, Any], inherited: list[int]) -> int:
    nursery = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = _role(order, inherited, nursery)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _role(order: dict[str, Any], inherited: list[int], parent: int) -> int:
    """The child: its own session, its own log, no descriptor of the nursery's; then the role's command.

    `parent` is the nursery's pid from before the fork: a child that asks later may be an orphan already.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    for descriptor in inherited:
        os.close(descriptor)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    from ..cli import main as command

    return command([*order["argv"], "--parent", str(parent)])


if __name__ == "__main__":
    main()
