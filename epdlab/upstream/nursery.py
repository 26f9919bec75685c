"""Imports one release once and forks a process for every role; runs inside the upstream environment.

Importing a release takes ten seconds and more, a fork takes none, so every scenario gets processes of its own.
Argument: JSON with `version` and `folder`. One JSON line asks for a child, which speaks over the Unix socket it names.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from typing import Any, NoReturn

from epdlab.upstream import stage

PACKAGES = ("mooncake-transfer-engine-non-cuda", "torch", "transformers", "fastapi", "uvicorn", "pyzmq")


def versions() -> dict[str, str]:
    """What runs in this environment."""
    return {name: importlib.metadata.version(name) for name in PACKAGES} | {"python": platform.python_version()}


def become(order: dict[str, Any]) -> NoReturn:
    """Turns this fork into `order["module"]`: its standard input and output are the socket, its errors a log."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        link = socket.socket(socket.AF_UNIX)
        link.connect(order["socket"])
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for target, source in ((0, link.fileno()), (1, link.fileno()), (2, log)):
            os.dup2(source, target)
        link.close()
        threading.Thread(target=_end_with_parent, daemon=True).start()
        sys.argv = [order["module"], json.dumps(order["argument"])]
        runpy.run_module(f"epdlab.upstream.{order['module']}", run_name="__main__")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(0)


def _end_with_parent() -> None:
    """Ends this process as soon as the other side of the socket is closed."""
    poll = select.poll()
    poll.register(0, select.POLLRDHUP | select.POLLHUP)
    poll.poll()
    os._exit(0)


def main() -> NoReturn:
    """Forks on demand until standard input closes."""
    wanted = json.loads(sys.argv[1])
    stage.load(wanted["version"], wanted["folder"])
    if len(os.listdir("/proc/self/task")) != 1:
        raise SystemExit("importing the release started a thread; a fork of this process would not be safe")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print(json.dumps(versions()), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            become(order)
        print(json.dumps({"pid": pid}), flush=True)
    os._exit(0)  # taking a release down in order takes many seconds


if __name__ == "__main__":
    main()
