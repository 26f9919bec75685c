"""Hand-made traces: events with the labels the core gives them, one after the other, without a run.

`Tape.handoff` is a whole transfer that keeps every invariant; a test records the piece it wants to break by itself.
"""

from __future__ import annotations

from typing import Any

from epdlab.steps import Event

PART_BYTES = 65_536
SOURCE = 0x10_0000
TARGET = 0x80_0000
STEP_NS = 100_000


class Tape:
    """A trace in the making. Every method records and answers the index of its last event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, process: str, step: str, phase: str, **labels: Any) -> int:
        t = 1_000_000_000 + STEP_NS * len(self.events)
        self.events.append(Event(t, process, step, phase, **labels))  # type: ignore[arg-type]
        return len(self.events) - 1

    def note(self, process: str, step: str, **labels: Any) -> int:
        return self.add(process, step, "note", **labels)

    def do(self, process: str, step: str, result: int | str = "ok", **labels: Any) -> int:
        self.add(process, step, "begin", **labels)
        return self.add(process, step, "end", result=result, **labels)

    # ---- pieces --------------------------------------------------------------------------------------------------

    def start(self, rank: int = 0, req: str = "q1", parts: int = 1) -> int:
        return self.note(f"rank{rank}", "request.start", req=req, rank=rank, data={"parts": parts})

    def finish(self, rank: int = 0, req: str = "q1", result: str = "ok") -> int:
        return self.note(f"rank{rank}", "request.finish", req=req, rank=rank, result=result)

    def encode(self, rank: int = 0, req: str = "q1", part: int = 0, digest: str = "d1") -> int:
        """A rank asks for a part, and the encoder makes it."""
        about = {"req": req, "part": part}
        self.add(f"rank{rank}", "encode.post", "begin", rank=rank, peer="http://127.0.0.1:1/encode", **about)
        self.do("enc0", "encode.serve", rank=rank, **about)
        self.do("enc0", "encode.forward", bytes=PART_BYTES, **about)
        self.ready(req, part, digest)
        return self.add(f"rank{rank}", "encode.post", "end", result="ok", rank=rank, **about)

    def ready(self, req: str = "q1", part: int = 0, digest: str = "d1") -> int:
        address = SOURCE + part * PART_BYTES
        data = {"digest": digest}
        return self.note("enc0", "embedding.ready", req=req, part=part, address=address, bytes=PART_BYTES, data=data)

    def land(self, rank: int = 0, req: str = "q1", parts: int = 1, address: int = TARGET, slot: int = 1) -> int:
        """A rank sets memory aside for a request and registers it."""
        process, nbytes = f"rank{rank}", parts * PART_BYTES
        self.add(process, "landing.alloc", "begin", req=req, rank=rank, bytes=nbytes)
        name = f"{process}.slot#{slot}"
        where = {"region": name, "address": address, "bytes": nbytes}
        self.add(process, "landing.alloc", "end", result="ok", req=req, rank=rank, **where)
        return self.register(process, slot, address, nbytes, req=req, rank=rank)

    def register(
        self, process: str, number: int, address: int, nbytes: int = PART_BYTES, code: int = 0, **about: Any
    ) -> int:
        region = f"{process}.mr#{number}"
        return self.do(process, "mr.register", code, region=region, address=address, bytes=nbytes, **about)

    def deregister(self, process: str, number: int, address: int, code: int = 0, **about: Any) -> int:
        region = f"{process}.mr#{number}"
        return self.do(process, "mr.deregister", code, region=region, address=address, bytes=PART_BYTES, **about)

    def ask(self, rank: int = 0, req: str = "q1", part: int = 0) -> int:
        """A /send reaches the encoder, and the part is found."""
        about = {"req": req, "part": part, "rank": rank}
        self.add(f"rank{rank}", "send.post", "begin", peer="http://127.0.0.1:1/send", **about)
        self.do("enc0", "send.serve", **about)
        return self.do("enc0", "send.lookup", **about)

    def write(self, phase: str, rank: int = 0, req: str = "q1", part: int = 0, **more: Any) -> int:
        labels = {"region": "enc0.mr#1", "address": SOURCE + part * PART_BYTES, "bytes": PART_BYTES}
        labels |= {"peer": "127.0.0.1:2", "target": TARGET + part * PART_BYTES} | more
        return self.add("enc0", "transfer.write", phase, req=req, part=part, rank=rank, **labels)

    def wrote(self, code: int = 0, **about: Any) -> int:
        self.write("begin", **about)
        return self.write("end", result=code, **about)

    def write_late(self, rank: int = 0, req: str = "q1", part: int = 0) -> int:
        """Bytes of a write that failed arrive after all."""
        where = {"address": SOURCE, "bytes": PART_BYTES, "target": TARGET + part * PART_BYTES}
        return self.note("enc0", "transfer.land", req=req, part=part, rank=rank, **where)

    def ack(self, rank: int = 0, req: str = "q1", part: int = 0) -> int:
        about = {"req": req, "part": part, "rank": rank}
        self.do("enc0", "ack.push", peer="127.0.0.1:3", **about)
        return self.do(f"rank{rank}", "ack.pull", data={"of": req}, **about)

    def read(self, rank: int = 0, req: str = "q1", part: int = 0, digest: str = "d1") -> int:
        about = {"req": req, "part": part, "rank": rank, "address": TARGET, "bytes": PART_BYTES}
        self.add(f"rank{rank}", "landing.read", "begin", **about)
        return self.add(f"rank{rank}", "landing.read", "end", result="ok", data={"digest": digest}, **about)

    def free(self, rank: int = 0, req: str = "q1", slot: int = 1, address: int = TARGET) -> int:
        where = {"region": f"rank{rank}.slot#{slot}", "address": address, "bytes": PART_BYTES}
        return self.do(f"rank{rank}", "landing.free", req=req, rank=rank, **where)

    def fire(self, process: str, timer: str, **about: Any) -> int:
        return self.do(process, "timer.fire", data={"timer": timer}, **about)

    def census(self, process: str, **counts: int) -> int:
        return self.note(process, "process.census", data=counts)

    # ---- whole runs ----------------------------------------------------------------------------------------------

    def introduce(self, ranks: int = 1) -> None:
        hello = {"role": "encoder", "pid": 100, "url": "http://127.0.0.1:1", "session": "127.0.0.1:10"}
        self.note("enc0", "process.start", data=hello)
        for rank in range(ranks):
            hello = {"role": "prefill", "pid": 200 + rank, "session": f"127.0.0.1:{20 + rank}"}
            self.note(f"rank{rank}", "process.start", data=hello)

    def handoff(self, ranks: int = 1, req: str = "q1", parts: int = 1) -> Tape:
        """One request on every rank, from its start to its end, as `hardened` does it; nothing is left."""
        for rank in range(ranks):
            self.start(rank, req, parts)
            for part in range(parts):
                self.encode(rank, req, part)
        for part in range(parts):
            self.register("enc0", part + 1, SOURCE + part * PART_BYTES, req=req, part=part)
        for rank in range(ranks):
            self.land(rank, req, parts)
            for part in range(parts):
                self.serve(rank, req, part)
        for part in range(parts):
            self.do("enc0", "part.release", req=req, part=part, data={"why": "every receiver served"})
            self.deregister("enc0", part + 1, SOURCE + part * PART_BYTES, req=req, part=part)
            self.do("enc0", "embedding.drop", req=req, part=part, address=SOURCE, bytes=PART_BYTES)
        for rank in range(ranks):
            self.end(rank, req, parts)
        return self

    def serve(self, rank: int, req: str, part: int) -> None:
        self.ask(rank, req, part)
        self.wrote(rank=rank, req=req, part=part, region=f"enc0.mr#{part + 1}")
        self.ack(rank, req, part)
        self.add(f"rank{rank}", "send.post", "end", result="ok", req=req, part=part, rank=rank)

    def end(self, rank: int, req: str, parts: int) -> None:
        for part in range(parts):
            self.read(rank, req, part)
        self.finish(rank, req)
        self.deregister(f"rank{rank}", 1, TARGET, req=req, rank=rank)
        self.free(rank, req)


def race() -> Tape:
    """Two ranks under sglang-0.5.16: rank 1's registration is refused, rank 0's clean-up withdraws its source."""
    tape = Tape()
    tape.introduce(2)
    for rank in (0, 1):
        tape.start(rank)
        tape.encode(rank)
        tape.land(rank)
    tape.ask(0)
    tape.register("enc0", 1, SOURCE, req="q1", part=0, rank=0)
    tape.write("begin", rank=0)
    tape.ask(1)
    tape.register("enc0", 2, SOURCE, code=-7, req="q1", part=0, rank=1)
    tape.write("begin", rank=1, region="enc0.mr#2")
    tape.write("end", rank=0, result=0)
    tape.deregister("enc0", 1, SOURCE, req="q1", part=0, rank=0)
    tape.write("end", rank=1, region="enc0.mr#2", result=0)
    tape.deregister("enc0", 2, SOURCE, code=-3, req="q1", part=0, rank=1)
    for rank in (0, 1):
        tape.ack(rank)
        tape.end(rank, "q1", 1)
    return tape
