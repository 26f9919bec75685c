"""How a fault strikes a world: at a step, through the gate's decision, or at any time, as a move of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..steps import GO, Decision, Event, Phase, Point
from .scenario import ENCODER, FIRST, Fault, Move

if TYPE_CHECKING:
    from .world import World

OTHER = "other"


class Striker:
    """No fault at all, and the base of those there are."""

    def __init__(self, world: World, fault: Fault | None) -> None:
        self.world, self.fault = world, fault
        self.struck = False

    def moves(self) -> list[Move]:
        """The fault's own move, while it can happen."""
        return []

    def strike(self) -> None:
        """Take the fault's own move."""

    def decide(self, point: Point) -> Decision:
        """What the gate answers to a step that was taken."""
        return GO

    def settled(self) -> None:
        """The world is quiet after a move."""

    def finish(self) -> None:
        """The last request is over."""


class AtStep(Striker):
    """Strikes the first step that matches its target, by the gate's decision."""

    DECISIONS = {
        "transfer_fails": Decision("fail", -1),
        "send_repeated": Decision("repeat"),
        "ack_lost": Decision("drop"),
        "register_refused": Decision("fail", -7),
        "transfer_late": GO,
    }

    def __init__(self, world: World, fault: Fault) -> None:
        super().__init__(world, fault)
        self._target, self._decision = fault.target, self.DECISIONS[fault.kind]

    def decide(self, point: Point) -> Decision:
        if self.struck or not self._target.matches(point):
            return GO
        self.struck = True
        self.world.touch(("fault",), "w")
        self.hit(point)
        return self._decision

    def hit(self, point: Point) -> None:
        """The fault strikes here."""


class TransferLate(AtStep):
    """The write's end answers -1; its bytes land later."""

    def hit(self, point: Point) -> None:
        for move, write in self.world.writes.items():
            if move[:6] == (point.process, point.step, point.phase, point.req, point.part, point.rank):
                write.late = True


class RegisterRefused(AtStep):
    """The engine answers -7; another owner's region, half as long, starts at the same address, and is written from."""

    def __init__(self, world: World, fault: Fault) -> None:
        super().__init__(world, fault)
        self._pending: Point | None = None
        self._region: dict[str, Any] = {}
        self._process = fault.target.process

    def hit(self, point: Point) -> None:
        self._pending = point

    def settled(self) -> None:
        if self._pending is None:
            return
        self._pending = None
        asked = next(e for e in reversed(self.world.events) if e.step == "mr.register" and e.fault == "fail")
        assert asked.address is not None and asked.bytes is not None
        address, nbytes = asked.address, asked.bytes // 2
        self._region = {"req": OTHER, "region": f"{self._process}.{OTHER}#1", "address": address, "bytes": nbytes}
        self._event("mr.register", "end", self._engine.register(address, nbytes))
        self._event("transfer.write", "begin", None)

    def finish(self) -> None:
        if not self._region or self._process in self.world.dead:
            return
        covered = self._engine.covers(self._region["address"], self._region["bytes"])
        self._event("transfer.write", "end", 0 if covered else -1)
        self._event("mr.deregister", "end", self._engine.deregister(self._region["address"]))

    @property
    def _engine(self) -> Any:
        return self.world.fabric.engines[self._process]

    def _event(self, step: str, phase: Phase, result: int | None) -> None:
        self.world.record(Event(self.world.events[-1].t + 1, self._process, step, phase, result=result, **self._region))


class AnyTime(Striker):
    """Strikes by a move of its own, which can come as long as `possible`."""

    def __init__(self, world: World, fault: Fault) -> None:
        super().__init__(world, fault)
        target = fault.target
        req = None if fault.kind == "encoder_dies" else FIRST
        phase = "begin" if target.step == "timer.fire" else "note"
        self._moves = [Move(target.process, target.step, phase, req, target.part, target.rank, -1)]

    def moves(self) -> list[Move]:
        return self._moves if not self.struck and self.possible() else []

    def possible(self) -> bool:
        raise NotImplementedError

    def strike(self) -> None:
        self.struck = True
        self.happen()

    def happen(self) -> None:
        raise NotImplementedError


class RankCancels(AnyTime):
    """The client of rank 0 gives its first request up."""

    def possible(self) -> bool:
        return not self.world.requests[0, 0].done()

    def happen(self) -> None:
        self.world.note("rank0", "request.cancel", req=FIRST, rank=0)
        self.world.requests[0, 0].cancel()


class TimerFires(AnyTime):
    """A deadline, or the encoder's clean-up timer, fires early."""

    NAMES = {"receiver_deadline": "deadline", "cleanup_timer": "cleanup"}

    def possible(self) -> bool:
        return self._timer() is not None

    def happen(self) -> None:
        timer = self._timer()
        assert timer is not None
        self.world.pass_once = "timer.fire"
        timer.run()

    def _timer(self) -> Any:
        assert self.fault is not None
        name, target = self.NAMES[self.fault.kind], self.fault.target
        for timer in self.world.timers:
            if timer.name == name and timer.process == target.process and timer.labels["req"] == FIRST:
                if timer.labels.get("part") == target.part:
                    return timer
        return None


class EncoderDies(AnyTime):
    """The encoder's process is killed: it does nothing any more, its peers learn it, its writes may land late."""

    def possible(self) -> bool:
        return True

    def happen(self) -> None:
        world = self.world
        world.record(Event(world._clock_ns(), ENCODER, "process.kill", "begin", fault="kill"))
        world.dead.add(ENCODER)
        for move, write in world.writes.items():
            write.late = True
            land = Move(move.process, "transfer.land", "note", move.req, move.part, move.rank, 0)
            world.late[land] = (world.waiting[move][0], write)
        world.encoder.engine.close()
        world.timers[:] = [timer for timer in world.timers if timer.process != ENCODER]
        world.network.kill(ENCODER)


_STRIKERS: dict[str, type[AtStep] | type[AnyTime]] = {
    "transfer_fails": AtStep,
    "transfer_late": TransferLate,
    "send_repeated": AtStep,
    "ack_lost": AtStep,
    "register_refused": RegisterRefused,
    "rank_cancels": RankCancels,
    "receiver_deadline": TimerFires,
    "cleanup_timer": TimerFires,
    "encoder_dies": EncoderDies,
}


def striker_of(world: World, fault: Fault | None) -> Striker:
    return Striker(world, None) if fault is None else _STRIKERS[fault.kind](world, fault)
