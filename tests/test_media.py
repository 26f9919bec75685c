"""References to pixels: what is read, and every reference that must be refused."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

import epdlab.media
from epdlab import fetch
from epdlab.errors import MediaError
from epdlab.media import (
    SAMPLES,
    MediaFetchFailed,
    MediaForbidden,
    MediaNotFound,
    MediaPolicy,
    MediaTooLarge,
    MediaUnsupported,
    load_item,
)
from epdlab.modality import Modality

IMAGE, VIDEO = Modality.IMAGE, Modality.VIDEO
PNG = (SAMPLES / "tiles.png").read_bytes()
GIF = (SAMPLES / "ball.gif").read_bytes()


def png(width: int, height: int) -> bytes:
    """A PNG that announces a size and holds one row's worth of nothing."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def encoded(image: Image.Image, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG", **options)
    return stream.getvalue()


def data_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


async def refused(ref: str, modality: Modality, policy: MediaPolicy, error: type[MediaError], words: str) -> None:
    """The reference is refused with this error, on one line, with these words, and a mend after a colon."""
    with pytest.raises(error, match=words) as caught:
        await load_item(ref, modality, policy)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 300 and ": " in message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "allowed"
    root.mkdir()
    (root / "tiles.png").write_bytes(PNG)
    (tmp_path / "secret.png").write_bytes(PNG)
    return root


# --- what is read


@pytest.mark.parametrize("name", ["harbour.png", "tiles.png"])
async def test_a_sample_image_is_read_as_rgb(name: str) -> None:
    image = await load_item(name, IMAGE, MediaPolicy(allowed_root=SAMPLES))
    with Image.open(SAMPLES / name) as expected:
        assert isinstance(image, Image.Image) and image.mode == "RGB"
        assert image.tobytes() == expected.convert("RGB").tobytes()


async def test_the_sample_video_has_eight_different_frames() -> None:
    frames = await load_item("ball.gif", VIDEO, MediaPolicy(allowed_root=SAMPLES))
    assert isinstance(frames, list)
    assert [(frame.size, frame.mode) for frame in frames] == [((224, 168), "RGB")] * 8
    assert len({frame.tobytes() for frame in frames}) == 8


async def test_an_animation_taken_as_an_image_is_its_first_frame() -> None:
    policy = MediaPolicy(allowed_root=SAMPLES)
    image, frames = await load_item("ball.gif", IMAGE, policy), await load_item("ball.gif", VIDEO, policy)
    assert isinstance(image, Image.Image) and isinstance(frames, list)
    assert image.tobytes() == frames[0].tobytes()


async def test_absolute_paths_links_and_odd_names_inside_the_folder_are_read(folder: Path) -> None:
    (folder / "link.png").symlink_to(folder / "tiles.png")
    (folder / "a:b?c #1.png").write_bytes(PNG)
    (folder / "deep").mkdir()
    for ref in (str(folder / "tiles.png"), "link.png", "a:b?c #1.png", "deep/../tiles.png"):
        image = await load_item(ref, IMAGE, MediaPolicy(allowed_root=folder))
        assert isinstance(image, Image.Image) and image.size == (336, 280)


async def test_a_folder_of_frames_is_read_in_natural_order(folder: Path) -> None:
    for number in (10, 2, 1):
        (folder / f"frame_{number}.png").write_bytes(encoded(Image.new("RGB", (4, 4), (number, 0, 0))))
    (folder / "tiles.png").unlink()
    (folder / ".hidden").write_text("not a frame")
    frames = await load_item(".", VIDEO, MediaPolicy(allowed_root=folder))
    assert isinstance(frames, list)
    assert [frame.getpixel((0, 0)) for frame in frames] == [(1, 0, 0), (2, 0, 0), (10, 0, 0)]


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "I;16"])
async def test_every_colour_mode_becomes_rgb(mode: str) -> None:
    image = await load_item(data_uri(encoded(Image.new(mode, (5, 3)))), IMAGE, MediaPolicy())
    assert isinstance(image, Image.Image) and (image.mode, image.size) == ("RGB", (5, 3))


async def test_a_data_uri_needs_no_allowed_folder() -> None:
    frames = await load_item(data_uri(GIF, "image/gif"), VIDEO, MediaPolicy())
    assert isinstance(frames, list) and len(frames) == 8


# --- paths that are refused


@pytest.mark.parametrize(
    "ref", ["../secret.png", "/etc/passwd", "/etc/no-such-file", "deep/../../secret.png", "~/x.png/../../.."]
)
async def test_a_path_outside_the_folder_is_refused(folder: Path, ref: str) -> None:
    await refused(ref, IMAGE, MediaPolicy(allowed_root=folder / "x/.."), MediaForbidden, "outside the allowed folder")


async def test_a_link_that_leads_outside_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "file.png").symlink_to(tmp_path / "secret.png")
    (folder / "up").symlink_to(tmp_path)
    for ref in ("file.png", "up/secret.png"):
        await refused(ref, IMAGE, MediaPolicy(allowed_root=folder), MediaForbidden, "outside the allowed folder")


async def test_a_link_among_the_frames_of_a_folder_that_leads_outside_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "z.png").symlink_to(tmp_path / "secret.png")
    await refused(".", VIDEO, MediaPolicy(allowed_root=folder), MediaForbidden, "outside the allowed folder")


def test_a_link_swapped_in_after_the_check_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """The path was checked as a plain folder; before it is opened, the folder becomes a link to the outside."""
    (folder / "deep").symlink_to(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MediaNotFound, match="cannot open"):
        epdlab.media._open(folder, folder / "deep" / "secret.png", "deep/secret.png")
    assert len(os.listdir("/proc/self/fd")) == before


async def test_without_an_allowed_folder_no_path_is_read() -> None:
    await refused(str(SAMPLES / "tiles.png"), IMAGE, MediaPolicy(), MediaForbidden, "set an allowed folder")


@pytest.mark.parametrize("ref", ["none.png", "tiles.png/x", "no\0name", "n" * 5000, ""])
async def test_a_path_that_leads_to_no_file(folder: Path, ref: str) -> None:
    await refused(ref, IMAGE, MediaPolicy(allowed_root=folder), MediaNotFound, "check the path|name a file")


async def test_an_allowed_folder_that_is_gone(tmp_path: Path) -> None:
    await refused("x.png", IMAGE, MediaPolicy(allowed_root=tmp_path / "gone"), MediaNotFound, "cannot open")


async def test_a_link_loop(folder: Path) -> None:
    (folder / "loop").symlink_to(folder / "loop")
    await refused("loop", IMAGE, MediaPolicy(allowed_root=folder), MediaNotFound, "check the path")


async def test_a_pipe_is_refused_and_does_not_block(folder: Path) -> None:
    os.mkfifo(folder / "pipe.png")
    await refused("pipe.png", IMAGE, MediaPolicy(allowed_root=folder), MediaUnsupported, "no regular file")


@pytest.mark.parametrize("scheme", ["file", "ftp", "gopher", "s3"])
async def test_other_schemes_are_refused(scheme: str) -> None:
    await refused(f"{scheme}://host/x.png", IMAGE, MediaPolicy(), MediaUnsupported, f"scheme '{scheme}'")


# --- contents that are refused


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a whole image"),
        (b"no image at all", "not a whole image"),
        (b"%PDF-1.7", "not a whole image"),
        (PNG[: len(PNG) // 2], "not a whole image"),
        (PNG[:40], "not a whole image"),
    ],
)
async def test_a_file_that_is_no_whole_image(folder: Path, data: bytes, words: str) -> None:
    (folder / "x.png").write_bytes(data)
    for modality in Modality:
        await refused("x.png", modality, MediaPolicy(allowed_root=folder), MediaUnsupported, words)


@pytest.mark.parametrize("side", [8_000, 10_000, 20_000, 60_000])
async def test_a_pixel_bomb_is_refused_by_its_header(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """8,000 is over our limit only, 10,000 is where Pillow warns, 20,000 where it raises."""

    def decode(*_: object, **__: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(Image.Image, "convert", decode)
    for modality in Modality:
        await refused(data_uri(png(side, side)), modality, MediaPolicy(), MediaTooLarge, "over 50000000 pixels")


async def test_a_frame_larger_than_its_animation_is_refused() -> None:
    """A GIF of 4 x 4 pixels whose second frame claims 60,000 x 60,000."""
    pictures = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    stream = io.BytesIO()
    pictures[0].save(stream, "GIF", save_all=True, append_images=pictures[1:])
    data = bytearray(stream.getvalue())
    second = data.rindex(b"\x2c" + struct.pack("<HHHH", 0, 0, 4, 4))
    data[second + 5 : second + 9] = struct.pack("<HH", 60_000, 60_000)
    await refused(data_uri(bytes(data), "image/gif"), VIDEO, MediaPolicy(), MediaTooLarge, "pixels")


async def test_the_frames_of_a_video_count_together() -> None:
    policy = MediaPolicy(max_pixels=8 * 224 * 168 - 1)
    await refused(data_uri(GIF, "image/gif"), VIDEO, policy, MediaTooLarge, "pixels: scale it down")
    assert await load_item(data_uri(GIF, "image/gif"), IMAGE, policy)


async def test_too_many_frames(folder: Path) -> None:
    await refused(data_uri(GIF, "image/gif"), VIDEO, MediaPolicy(max_frames=7), MediaTooLarge, "over 7 frames")
    (folder / "again.png").write_bytes(PNG)
    await refused(".", VIDEO, MediaPolicy(allowed_root=folder, max_frames=1), MediaTooLarge, "over 1 frames")


async def test_too_many_bytes(folder: Path) -> None:
    exact, less = MediaPolicy(folder, max_bytes=len(PNG)), MediaPolicy(folder, max_bytes=len(PNG) - 1)
    for ref in ("tiles.png", data_uri(PNG)):
        assert await load_item(ref, IMAGE, exact)
        await refused(ref, IMAGE, less, MediaTooLarge, f"over {len(PNG) - 1} bytes")
    (folder / "again.png").write_bytes(PNG)
    await refused(".", VIDEO, exact, MediaTooLarge, "bytes")


async def test_what_is_no_video(folder: Path) -> None:
    policy = MediaPolicy(allowed_root=folder)
    await refused("tiles.png", VIDEO, policy, MediaUnsupported, r"has 1 frame\(s\)")
    await refused(".", VIDEO, policy, MediaUnsupported, r"has 1 frame\(s\)")
    await refused(".", IMAGE, policy, MediaUnsupported, "is a folder")
    (folder / "b.png").write_bytes(encoded(Image.new("RGB", (3, 3))))
    await refused(".", VIDEO, policy, MediaUnsupported, "differ in size")
    (folder / "b.png").write_bytes(b"no image")
    await refused(".", VIDEO, policy, MediaUnsupported, "not a whole image")


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("data:image/png;base64,@@@@", "no valid base64"),
        ("data:image/png;base64,abc", "no valid base64"),
        ("data:image/png;base64,\u00e9", "no valid base64"),
        ("data:image/png,plain", "write data:image/TYPE;base64"),
        ("data:text/html;base64,aGk=", "write data:image/TYPE;base64"),
        ("data:image/png;base64", "write data:image/TYPE;base64"),
        ("data:,", "write data:image/TYPE;base64"),
    ],
)
async def test_a_data_uri_that_is_none(ref: str, words: str) -> None:
    await refused(ref, IMAGE, MediaPolicy(), MediaUnsupported, words)


@given(st.sampled_from([PNG, GIF]), st.lists(st.tuples(st.integers(0, 7999), st.integers(0, 255)), max_size=12))
@example(PNG, [])
@settings(max_examples=60, deadline=None)
def test_damaged_bytes_give_pixels_or_a_media_error(source: bytes, damage: list[tuple[int, int]]) -> None:
    data = bytearray(source)
    for position, value in damage:
        data[position % len(data)] = value
    try:
        frames = asyncio.run(load_item(data_uri(bytes(data)), VIDEO, MediaPolicy(max_pixels=1_000_000)))
    except MediaError:
        return
    assert isinstance(frames, list) and len(frames) >= 2


# --- URLs


class Site:
    """A web server on loopback, and the paths it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.never = asyncio.Event()
        app = web.Application()
        app.router.add_get("/{name:.*}", self.answer)
        self.server = TestServer(app)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server.port}/{path}"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        self.asked.append(name)
        match name:
            case "tiles.png":
                return web.Response(body=PNG, content_type="image/png")
            case "page.html":
                return web.Response(text="<html>", content_type="text/html")
            case "slow.png":
                await self.never.wait()
            case "moved.png":
                return web.Response(status=302, headers={"Location": "/tiles.png"})
            case "loop.png":
                return web.Response(status=307, headers={"Location": "/loop.png"})
            case "stream.png":
                return await self.stream(request)
            case _ if name.startswith("to/"):
                return web.Response(status=302, headers={"Location": name.removeprefix("to/")})
        return web.Response(status=404)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "image/png"})
        await reply.prepare(request)
        for _ in range(64):
            await reply.write(bytes(1024))
        return reply


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    await site.server.start_server()
    yield site
    site.never.set()
    await site.server.close()


OPEN = MediaPolicy(allow_private_urls=True, timeout_s=20)


async def test_a_url_is_read_also_through_a_redirect(site: Site) -> None:
    for path in ("tiles.png", "moved.png"):
        image = await load_item(site.url(path), IMAGE, OPEN)
        assert isinstance(image, Image.Image) and image.size == (336, 280)
    assert site.asked == ["tiles.png", "moved.png", "tiles.png"]


@pytest.mark.parametrize(
    "host",
    [
        *(
            "127.0.0.1",
            "127.1.2.3",
            "10.0.0.1",
            "192.168.1.1",
            "172.16.0.9",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
        ),
        *("224.0.0.1", "255.255.255.255", "[::1]", "[::]", "[fe80::1]", "[fd00::1]", "[ff02::1]", "[fec0::1]"),
        *("[::ffff:127.0.0.1]", "[::ffff:169.254.169.254]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[2001:0:0:1::1]"),
    ],
)
async def test_a_private_address_is_refused_before_any_connection(host: str) -> None:
    await refused(f"http://{host}:9/x.png", IMAGE, MediaPolicy(), MediaForbidden, "not public")


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_a_public_address_is_public(address: str) -> None:
    assert fetch.is_public(address)


@pytest.mark.parametrize("host", ["localhost", "0x7f000001", "2130706433", "127.1"])
async def test_a_name_that_stands_for_a_private_address_is_refused(site: Site, host: str) -> None:
    """The old spellings of 127.0.0.1 stop at the resolver's check, or already at aiohttp's."""
    error = MediaForbidden if host == "localhost" else MediaError
    await refused(site.url("tiles.png", host), IMAGE, MediaPolicy(), error, "not public|check the URL")
    assert site.asked == []


@pytest.mark.parametrize(
    "target", ["http://169.254.169.254/latest", "http://localhost:9/x", "http://[::1]/x", "//10.0.0.1/x"]
)
async def test_a_redirect_to_a_private_address_is_refused(
    site: Site, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first hop stands for a public server: its address alone, spelt so, is let through."""
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1" and "localhost" not in target)
    if "localhost" in target:
        monkeypatch.setattr(fetch, "_check_url", lambda url, policy: None)
    await refused(site.url(f"to/{target}"), IMAGE, MediaPolicy(), MediaForbidden, "not public")
    assert site.asked == [f"to/{target}"]


async def test_a_redirect_to_a_file_is_refused(site: Site) -> None:
    await refused(site.url("to/file:///etc/passwd"), IMAGE, OPEN, MediaUnsupported, "pass http")


def resolver(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """DNS of our own: the n-th look-up gets the n-th answer. Returns the list of names looked up."""
    names: list[str] = []

    def getaddrinfo(host: str, port: int, *_: object, **__: object) -> list[tuple[Any, ...]]:
        names.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answers[len(names) - 1]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return names


async def test_the_connection_goes_to_the_address_that_was_checked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS rebinding: a second look-up would give another address, so there is none."""
    names = resolver(monkeypatch, ["127.0.0.1"], ["10.0.0.1"])
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1")
    assert await load_item(site.url("tiles.png", "rebind.test"), IMAGE, MediaPolicy(timeout_s=20))
    assert names == ["rebind.test"]


async def test_one_private_address_among_a_names_addresses_is_enough(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver(monkeypatch, ["127.0.0.1", "10.0.0.1"])
    monkeypatch.setattr(fetch, "is_public", lambda address: address == "127.0.0.1")
    await refused(site.url("tiles.png", "both.test"), IMAGE, MediaPolicy(), MediaForbidden, "'both.test' leads to")
    assert site.asked == []


@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        ("page.html", MediaUnsupported, "is 'text/html'"),
        ("none.png", MediaFetchFailed, "HTTP 404"),
        ("loop.png", MediaFetchFailed, "redirects over 5 times"),
    ],
)
async def test_an_answer_that_is_no_image(site: Site, path: str, error: type[MediaError], words: str) -> None:
    await refused(site.url(path), IMAGE, OPEN, error, words)


async def test_a_body_over_the_limit_is_cut_off(site: Site) -> None:
    limit = MediaPolicy(allow_private_urls=True, max_bytes=4096, timeout_s=20)
    for path in ("tiles.png", "stream.png"):  # with a Content-Length, and without
        await refused(site.url(path), IMAGE, limit, MediaTooLarge, "over 4096 bytes")


async def test_a_server_that_does_not_answer(site: Site) -> None:
    policy = MediaPolicy(allow_private_urls=True, timeout_s=0.3)
    await refused(site.url("slow.png"), IMAGE, policy, MediaFetchFailed, r"took over 0\.3 s")


async def test_urls_that_lead_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        await refused(f"http://127.0.0.1:{port}/x.png", IMAGE, OPEN, MediaFetchFailed, "check the URL")
    for ref in ("http://", "http:///x.png", "http://[::1", "http://host:99999/x"):
        await refused(ref, IMAGE, OPEN, MediaError, "pass http|check the URL")
    monkeypatch.setattr(socket, "getaddrinfo", _no_such_name)
    await refused("http://no-such-name.test/x.png", IMAGE, OPEN, MediaFetchFailed, "check the URL")


def _no_such_name(*_: object, **__: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


# --- the module


def test_importing_media_pulls_in_neither_torch_nor_aiohttp() -> None:
    code = "import sys, epdlab.media; print([m for m in ('torch', 'transformers', 'aiohttp') if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(Path(epdlab.media.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_samples_are_what_the_script_draws(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "tools" / "make_samples.py"
    subprocess.run([sys.executable, script, "--out", tmp_path], check=True, capture_output=True)
    for shipped in sorted(SAMPLES.iterdir()):
        with Image.open(shipped) as one, Image.open(tmp_path / shipped.name) as two:
            frames = getattr(one, "n_frames", 1)
            for frame in range(frames):
                one.seek(frame), two.seek(frame)
                assert one.convert("RGB").tobytes() == two.convert("RGB").tobytes()
