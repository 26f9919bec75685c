"""The processes and links of an EPD deployment with mooncake, and which of them need the master."""

from __future__ import annotations

from .. import canvas as c
from ..canvas import Canvas

HEIGHT = 640
ENC_X, ENC_W = 16, 268
PRE_X, PRE_W = 436, 264
DEC_X, DEC_W = 760, 104
RANKS = ((0, 150), (1, 286))
RANK_H = 120
STORE_Y = 470


def draw() -> str:
    """The SVG of the deployment."""
    canvas = Canvas(
        HEIGHT, "An EPD deployment with mooncake", "Processes on three hosts, the store, and the links between."
    )
    _encoder(canvas)
    _prefill(canvas)
    _decode(canvas)
    _store(canvas)
    for rank, top in RANKS:
        _hand_off(canvas, top, rank)
    entries = ((c.HTTP, "HTTP"), (c.ACK, "ZMQ, metadata only"), (c.WRITE, "one-sided write, Transfer Engine"))
    canvas.legend(
        20,
        HEIGHT - 16,
        (*entries, (c.OBJECT, "object bytes, store"), (c.RPC, "RPC"), (c.LOCAL, "inside a host")),
        gap=14,
    )
    return canvas.svg()


def _encoder(canvas: Canvas) -> None:
    canvas.group(ENC_X, 44, ENC_W, 406, c.ENCODER, "Encode host")
    canvas.box(
        ENC_X + 12,
        74,
        ENC_W - 24,
        56,
        c.ENCODER,
        "encode server, other ranks",
        ["vision tower (TP); no Transfer Engine;", "with the cache on, a pool and segment each"],
    )
    canvas.box(
        ENC_X + 12, 150, ENC_W - 24, 288, c.ENCODER, "encode server, rank 0", ["/encode and /send; owns embeddings"]
    )
    canvas.box(
        ENC_X + 128,
        202,
        118,
        162,
        c.MEMORY,
        "Transfer Engine",
        ["one region over", "each embedding,", "P2PHANDSHAKE"],
        centre=True,
    )
    canvas.box(
        ENC_X + 24,
        374,
        232,
        54,
        c.STORE,
        "embedding cache (optional)",
        ["host pool, store client, segment"],
        dash="5 3",
    )
    canvas.wire([(ENC_X + 60, 130), (ENC_X + 60, 150)], c.LOCAL, tail=True)
    canvas.text(ENC_X + 68, 144, "collectives", size=11, colour=c.MUTED)


def _prefill(canvas: Canvas) -> None:
    canvas.group(PRE_X, 44, PRE_W, 406, c.PREFILL, "Prefill host")
    canvas.box(PRE_X + 12, 74, PRE_W - 24, 56, c.PREFILL, "tokenizer process", ["splits items, receives no embedding"])
    for rank, top in RANKS:
        canvas.box(PRE_X + 12, top, PRE_W - 24, RANK_H, c.PREFILL, f"scheduler, TP rank {rank}", [])
        canvas.box(
            PRE_X + 24,
            top + 30,
            120,
            78,
            c.MEMORY,
            "landing memory",
            ["Transfer Engine", "region, this rank"],
            centre=True,
        )
        canvas.text(PRE_X + 154, top + 54, "language", size=11.5)
        canvas.text(PRE_X + 154, top + 69, "model, KV cache", size=11.5)
        canvas.wire([(PRE_X + 144, top + 84), (PRE_X + 236, top + 84)], c.LOCAL)
    canvas.box(
        PRE_X + 12, 416, PRE_W - 24, 26, c.STORE, "", ["HiCache store client (optional)"], dash="5 3", centre=True
    )
    canvas.wire([(PRE_X + 222, 130), (PRE_X + 222, 150)], c.LOCAL)
    canvas.text(PRE_X + 214, 144, "request and plan", size=11, colour=c.MUTED, anchor="end")
    canvas.box(PRE_X + 66, 8, 132, 24, c.PLAIN, "", ["client"], centre=True)
    canvas.wire([(PRE_X + 132, 32), (PRE_X + 132, 74)], c.HTTP)


def _decode(canvas: Canvas) -> None:
    canvas.group(DEC_X, 44, DEC_W, 406, c.DECODE, "Decode")
    canvas.box(
        DEC_X + 10,
        150,
        DEC_W - 20,
        256,
        c.DECODE,
        "",
        ["KV cache,", "language", "model,", "Transfer", "Engine"],
        centre=True,
    )
    for _, top in RANKS:
        canvas.wire([(PRE_X + PRE_W - 12, top + 84), (DEC_X + 10, top + 84)], c.WRITE)
        canvas.text(728, top + 74, "KV", size=11.5, anchor="middle")


def _hand_off(canvas: Canvas, top: int, rank: int) -> None:
    left, right = ENC_X + ENC_W - 12, PRE_X + 12
    rows = (
        (top + 22, [(right, top + 22), (left, top + 22)], c.HTTP, "POST /encode, /send"),
        (top + 66, [(left - 10, top + 66), (right + 12, top + 66)], c.WRITE, "write embedding"),
        (top + 104, [(left, top + 104), (right, top + 104)], c.ACK, "ack"),
    )
    for y, points, stroke, label in rows:
        canvas.wire(points, stroke)
        canvas.text((ENC_X + ENC_W + PRE_X) / 2, y - 7, label, size=11.5, anchor="middle")


def _store(canvas: Canvas) -> None:
    canvas.rect(ENC_X, STORE_Y, 848, 132, c.Look(c.STORE.line, "#fdf7fa"), radius=8)
    canvas.text(
        ENC_X + 12,
        STORE_Y + 120,
        "Mooncake Store: everything in this colour needs the master",
        size=12.5,
        bold=True,
        colour="#8a3f66",
    )
    canvas.text(
        850,
        STORE_Y + 120,
        "The rest finds its peer by handshake and needs no master",
        size=12,
        anchor="end",
        colour=c.MUTED,
    )
    canvas.box(
        330,
        STORE_Y + 26,
        200,
        62,
        c.STORE,
        "mooncake_master",
        ["keys, replicas, leases, free space", "never touches the bytes"],
        centre=True,
        size=12,
    )
    canvas.box(40, STORE_Y + 26, 190, 62, c.STORE, "donor: segment", ["embedding objects"], centre=True, size=12)
    canvas.box(640, STORE_Y + 26, 190, 62, c.STORE, "donor: segment", ["KV pages"], centre=True, size=12)
    canvas.wire([(100, 428), (100, STORE_Y + 26)], c.OBJECT, tail=True)
    canvas.text(110, 462, "GET, PUT", size=11.5)
    canvas.wire([(220, 428), (220, 462), (380, 462), (380, STORE_Y + 26)], c.RPC)
    canvas.text(330, 456, "lookup", size=11.5, anchor="middle")
    canvas.wire([(480, 442), (480, STORE_Y + 26)], c.RPC)
    canvas.wire([(670, 442), (670, STORE_Y + 26)], c.OBJECT, tail=True)
