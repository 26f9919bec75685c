"""One encode server of a release: its own app under uvicorn, and one control route of ours.

It runs inside the upstream environment. Argument: JSON with `version` and `folder`. Its line says port and session.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from epdlab.upstream import stage
from epdlab.upstream.recorder import CALLER, HOLD_LIMIT_S, Recorder

CONTROL = "/_epdlab"
POLL_S = 0.005
WATCHED = ("/encode", "/send", "/scheduler_receive_meta_data")

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Wire:
    """ASGI middleware: notes every request and reply of the hand-off as it is on the wire, and names the caller."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]], recorder: Recorder) -> None:
        self._app = app
        self._recorder = recorder

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Passes everything on unchanged."""
        if scope["type"] != "http" or scope["path"] not in WATCHED:
            await self._app(scope, receive, send)
            return
        body = await _whole_body(receive)
        request = json.loads(body)
        reply: Message = {"body": b"", "status": 500}

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                reply["status"] = message["status"]
            else:
                reply["body"] += message.get("body", b"")
                if not message.get("more_body"):
                    self._note(scope["path"], request, reply)
            await send(message)

        session = request.get("session_id")
        CALLER.set(session)
        self._recorder.serving += 1
        try:
            await _until(lambda: session not in self._recorder.parked, HOLD_LIMIT_S)
            await self._app(scope, _replay(body, receive), watched)
        except Exception:  # the app's outermost layer answers it, beyond this one
            self._note(scope["path"], request, reply)
            raise
        finally:
            self._recorder.serving -= 1

    def _note(self, path: str, request: Message, reply: Message) -> None:
        answer = json.loads(reply["body"]) if reply["body"].startswith((b"{", b"null")) else None
        self._recorder.answered += path == "/send"
        self._recorder.note("http", path=path, request=request, status=reply["status"], reply=answer, rc=None)


async def _whole_body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body again, then what the client really sends."""
    first = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again


class Control:
    """What a scenario may ask of this process; each public method is one word of the control route."""

    def __init__(self, release: stage.Release) -> None:
        self.recorder = Recorder()
        self._release = release
        self._engine = stage.start_engine(self.recorder)
        self._tower = stage.Tower(self.recorder)
        self._encoder = stage.build_encoder(release, self._engine, self._tower, self.recorder)
        self.session = str(self._engine.session_id)
        self._owned = 0

    async def take(self) -> Message:
        """The events so far and the embeddings whose memory is still held."""
        return {"held": self._tower.held(), "events": self.recorder.take()}

    async def setup(self, send_timeout: float, global_cache: bool) -> Message:
        """How the next scenario wants the encoder; what the last one armed is gone."""
        self.recorder.disarm()
        stage.set_send_timeout(self._release, self._encoder, send_timeout)
        if self._release.new_layout:
            stage.set_global_cache(self._release, self._encoder, global_cache)
        return {}

    async def hold(self, key: str) -> Message:
        """See Recorder.hold."""
        self.recorder.hold(key)
        return {}

    async def gather(self, count: int) -> Message:
        """See Recorder.gather."""
        self.recorder.gather(count)
        return {}

    async def park(self, sessions: list[str]) -> Message:
        """The /send calls of exactly these sessions are kept before the app."""
        self.recorder.parked = set(sessions)
        return {}

    async def release(self, keys: list[str]) -> Message:
        """See Recorder.release."""
        self.recorder.release(keys)
        return {}

    async def fail(self, key: str, code: int) -> Message:
        """See Recorder.fail."""
        self.recorder.fail(key, code)
        return {}

    async def occupy(self, offset: int) -> Message:
        """Another owner registers the next embedding's memory from `offset` to its end, before the release can."""

        def register(address: int, nbytes: int) -> None:
            self._owned = address + offset
            self._engine.engine.register_memory(address + offset, nbytes - offset, owner="other")

        self._tower.before = register
        return {}

    async def owner_deregisters(self) -> Message:
        """The other owner lets go of what it registered."""
        self._engine.engine.unregister_memory(self._owned, owner="other")
        return {}

    async def await_held(self, key: str, seconds: float) -> Message:
        """Waits until a write to `key` is held."""
        return {"came": await _until(lambda: self.recorder.is_held(key), seconds)}

    async def await_quiet(self, seconds: float) -> Message:
        """Waits until every request that came was answered."""
        return {"came": await _until(lambda: self.recorder.serving == 0, seconds)}

    async def await_answers(self, count: int, seconds: float) -> Message:
        """Waits until `count` /send calls were answered."""
        return {"came": await _until(lambda: self.recorder.answered >= count, seconds)}

    async def await_refused(self, seconds: float) -> Message:
        """Waits until a registration of the release was refused."""
        return {"came": await _until(lambda: self.recorder.refused, seconds)}

    async def await_cleanup(self, request: str, done: bool, seconds: float) -> Message:
        """Waits until the release's clean-up of `request` has begun, or is done."""
        return {"came": await _until(lambda: stage.cleaned_up(self._release, self._encoder, request, done), seconds)}


async def _until(holds: Callable[[], bool], seconds: float) -> bool:
    deadline = asyncio.get_running_loop().time() + seconds
    while not holds():
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True


async def _serve(release: stage.Release) -> None:
    """Builds everything on the loop that will run it, then serves until the parent is gone."""
    control = Control(release)
    app = release.front.app

    async def word(body: dict[str, Any]) -> Message:
        name = body.pop("do")
        answer: Message = await getattr(control, name)(**body)
        return answer

    app.post(CONTROL)(word)
    app.add_middleware(Wire, recorder=control.recorder)
    uvicorn = importlib.import_module("uvicorn")
    listener = socket.create_server((stage.HOST, 0))
    config = uvicorn.Config(app, log_level="critical", access_log=False, timeout_keep_alive=300)
    ready = {"port": listener.getsockname()[1], "session": control.session}
    print(json.dumps(ready), flush=True)
    await uvicorn.Server(config).serve(sockets=[listener])


def main() -> None:
    """Runs until the process is ended."""
    wanted = json.loads(sys.argv[1])
    asyncio.run(_serve(stage.load(wanted["version"], wanted["folder"])))


if __name__ == "__main__":
    main()
