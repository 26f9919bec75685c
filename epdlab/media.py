"""Item references turned into pixels, safely.

Owns: reading a reference (a path inside the allowed folder, a data: URI, an http(s) URL) within a `MediaPolicy`, and
decoding it to RGB frames. What never passes through here: tensors, the model, the wire.
A reference comes from a client, so it is hostile until it is checked: nothing is decoded before its size is known.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import os
import re
import stat
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageSequence

from .errors import MediaError
from .modality import Modality

SAMPLES = Path(__file__).parent / "samples"
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class MediaNotFound(MediaError):
    """No such file or folder."""

    kind = "media_not_found"
    http_status = 404


class MediaForbidden(MediaError):
    """A path outside the allowed folder, or a URL that leads to an address that is not public."""

    kind = "media_forbidden"
    http_status = 403


class MediaTooLarge(MediaError):
    """More bytes, pixels or frames than the policy allows."""

    kind = "media_too_large"
    http_status = 413


class MediaUnsupported(MediaError):
    """Not an image or a video that can be read."""

    kind = "media_unsupported"
    http_status = 415


class MediaFetchFailed(MediaError):
    """A URL that did not answer with the item in time."""

    kind = "media_fetch_failed"
    http_status = 502


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    """What a reference may do. Without `allowed_root` local paths are refused.

    Attributes:
        max_bytes: encoded size of one item, in bytes (a folder's files count together).
        max_pixels: width x height of one item (a video's frames count together).
        timeout_s: seconds for one URL, redirects included.
    """

    allowed_root: Path | None = None
    max_bytes: int = 20 * 1024 * 1024
    max_pixels: int = 50_000_000
    max_frames: int = 64
    allow_private_urls: bool = False
    timeout_s: float = 10.0


async def load_item(ref: str, modality: Modality, policy: MediaPolicy) -> Image.Image | list[Image.Image]:
    """Pixels of one item: an RGB image, or for a video its RGB frames (two or more, all of one size).

    ref: a path (relative ones start at the allowed folder), a data: URI or an http(s) URL. A video is an animated GIF,
    WebP or PNG, or a folder of image files in natural order of their names. Of an animation taken as an image, the
    first frame counts.

    Raises:
        MediaError: one of the five subclasses here; the message says what to change.
    """
    match _scheme(ref):
        case "":
            blobs = await asyncio.to_thread(_read_path, ref, modality, policy)
        case "data":
            blobs = [_read_data_uri(ref, policy)]
        case "http" | "https":
            from .fetch import fetch  # aiohttp takes half a second to import

            blobs = [await fetch(ref, policy)]
        case scheme:
            raise MediaUnsupported(f"scheme {scheme!r} of {short(ref)}: pass a path, a data: URI or an http(s) URL")
    frames = await asyncio.to_thread(_decode, blobs, ref, modality, policy)
    return frames if modality is Modality.VIDEO else frames[0]


def short(ref: str) -> str:
    """The reference for a one-line message: quoted, escaped, at most 80 characters of it."""
    return repr(ref if len(ref) <= 80 else f"{ref[:60]}...")


def check_bytes(count: int, ref: str, policy: MediaPolicy) -> None:
    """Raises MediaTooLarge if `count` bytes are more than the policy allows."""
    if count > policy.max_bytes:
        raise MediaTooLarge(f"{short(ref)} is over {policy.max_bytes} bytes: pass a smaller file or raise max_bytes")


def _scheme(ref: str) -> str:
    found = re.match(r"(data):|([a-z][a-z0-9+.-]*)://", ref, re.IGNORECASE)
    return (found[1] or found[2]).lower() if found else ""


def _read_data_uri(ref: str, policy: MediaPolicy) -> bytes:
    header, comma, body = ref.partition(",")
    if not comma or not re.fullmatch(r"data:image/[^;,]+(;[^;,]+)*;base64", header, re.IGNORECASE):
        raise MediaUnsupported(f"data URI {short(header)}: write data:image/TYPE;base64,...")
    check_bytes(len(body) * 3 // 4 - 2, header, policy)
    try:
        data = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaUnsupported(f"data URI {short(header)} holds no valid base64: encode the file again") from error
    check_bytes(len(data), header, policy)
    return data


def _read_path(ref: str, modality: Modality, policy: MediaPolicy) -> list[bytes]:
    file = _open(*_inside(ref, policy), ref)
    mode = os.fstat(file).st_mode
    if stat.S_ISDIR(mode):
        try:
            names = os.listdir(file)
        finally:
            os.close(file)
        return _read_folder(names, ref, modality, policy)
    with os.fdopen(file, "rb") as stream:
        if not stat.S_ISREG(mode):
            raise MediaUnsupported(f"{short(ref)} is no regular file: pass an image file")
        data = stream.read(policy.max_bytes + 1)
    check_bytes(len(data), ref, policy)
    return [data]


def _inside(ref: str, policy: MediaPolicy) -> tuple[Path, Path]:
    """The allowed folder and the file meant, links resolved; whether the file exists is not looked at outside."""
    if policy.allowed_root is None:
        raise MediaForbidden(f"local file {short(ref)}: set an allowed folder or send a data: URI")
    root = resolved(str(policy.allowed_root))
    target = resolved(ref, root)
    if not target.is_relative_to(root):
        raise MediaForbidden(f"{short(ref)} is outside the allowed folder: move it there or allow its folder")
    return root, target


def resolved(ref: str, root: Path = Path()) -> Path:
    """The file a path means, links resolved; a relative one starts at root.

    Raises:
        MediaNotFound: it is empty, or its links lead nowhere.
    """
    if not ref:
        raise MediaNotFound("the path of an image or video is empty: name a file")
    try:
        return (root / ref).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise MediaNotFound(f"{short(ref)} cannot be resolved: check the path for loops and odd characters") from error


def _open(root: Path, target: Path, ref: str) -> int:
    """A descriptor of target, reached from root without following links: one swapped in since is refused."""
    file = -1
    try:
        file = os.open(root, _OPEN)
        for part in target.relative_to(root).parts:
            outer, file = file, os.open(part, _OPEN, dir_fd=file)
            os.close(outer)
    except OSError as error:
        if file >= 0:
            os.close(file)
        raise MediaNotFound(f"cannot open {short(ref)} ({error.strerror}): check the path and its rights") from error
    return file


def _read_folder(names: list[str], ref: str, modality: Modality, policy: MediaPolicy) -> list[bytes]:
    if modality is not Modality.VIDEO:
        raise MediaUnsupported(f"{short(ref)} is a folder: pass an image file, or pass the folder as a video")
    frames = sorted((name for name in names if not name.startswith(".")), key=_natural)
    _check_frames(len(frames), ref, policy)
    blobs: list[bytes] = []
    for name in frames:
        blobs += _read_path(os.path.join(ref, name), Modality.IMAGE, policy)
        check_bytes(sum(map(len, blobs)), ref, policy)
    return blobs


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(digits), "") if digits else (-1, text) for digits, text in re.findall(r"([0-9]+)|([^0-9]+)", name)]


def _decode(blobs: list[bytes], ref: str, modality: Modality, policy: MediaPolicy) -> list[Image.Image]:
    frames: list[Image.Image] = []
    pixels = 0
    for frame in (frame for blob in blobs for frame in _frames(blob, ref, policy)):
        pixels += frame.width * frame.height
        if pixels > policy.max_pixels:
            raise _too_many_pixels(ref, policy)
        frames.append(_rgb(frame, ref))
        _check_frames(len(frames), ref, policy)
        if modality is Modality.IMAGE:
            return frames
    if len(frames) < 2:
        raise MediaUnsupported(f"{short(ref)} has {len(frames)} frame(s): pass an animated GIF or a folder of frames")
    if len({frame.size for frame in frames}) > 1:
        raise MediaUnsupported(f"frames of {short(ref)} differ in size: make them all one size")
    return frames


def _frames(blob: bytes, ref: str, policy: MediaPolicy) -> Iterator[Image.Image]:
    """Frames whose headers are read and whose pixels are not yet decoded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(blob), formats=FORMATS)
        yield from ImageSequence.Iterator(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many_pixels(ref, policy) from error
    except Exception as error:  # hostile bytes make a decoder raise anything
        raise _no_image(ref) from error


def _rgb(frame: Image.Image, ref: str) -> Image.Image:
    try:
        return frame.convert("RGB")
    except Exception as error:  # hostile bytes make a decoder raise anything
        raise _no_image(ref) from error


def _no_image(ref: str) -> MediaUnsupported:
    return MediaUnsupported(f"{short(ref)} is not a whole image: pass one of {', '.join(FORMATS)}")


def _too_many_pixels(ref: str, policy: MediaPolicy) -> MediaTooLarge:
    return MediaTooLarge(f"{short(ref)} is over {policy.max_pixels} pixels: scale it down or raise max_pixels")


def _check_frames(count: int, ref: str, policy: MediaPolicy) -> None:
    if count > policy.max_frames:
        raise MediaTooLarge(f"{short(ref)} has over {policy.max_frames} frames: shorten it or raise max_frames")
