"""One URL's bytes, and only from an address that may be asked.

Owns: the http(s) client for item references: redirects, address checks, limits. What never passes through here:
pixels, local files, calls between encoder and prefill. A name is resolved once, every address it has is checked, and
the connection goes to a checked address, so neither a redirect nor a second DNS answer leads inside the network.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from .media import MediaFetchFailed, MediaForbidden, MediaPolicy, MediaUnsupported, check_bytes, short

MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_CHUNK_BYTES = 64 * 1024


async def fetch(ref: str, policy: MediaPolicy) -> bytes:
    """The body of an image URL, at most `policy.max_bytes` long, within `policy.timeout_s`.

    Raises:
        MediaForbidden: an address on the way is not public. MediaUnsupported: no http(s) URL, or no image.
        MediaTooLarge: the body is longer. MediaFetchFailed: no answer, an error status, too many redirects.
    """
    connector = aiohttp.TCPConnector(resolver=_CheckedResolver(policy), use_dns_cache=False)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, auto_decompress=False) as session,
            asyncio.timeout(policy.timeout_s),
        ):
            return await _follow(session, ref, policy)
    except TimeoutError as error:
        raise MediaFetchFailed(f"{short(ref)} took over {policy.timeout_s} s: retry or raise timeout_s") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise MediaFetchFailed(f"cannot fetch {short(ref)} ({type(error).__name__}): check the URL") from error


async def _follow(session: aiohttp.ClientSession, ref: str, policy: MediaPolicy) -> bytes:
    url = URL(ref)
    for _ in range(MAX_REDIRECTS + 1):
        _check_url(url, policy)
        async with session.get(url, allow_redirects=False, headers={"Accept-Encoding": "identity"}) as reply:
            location = reply.headers.get("Location")
            if reply.status not in _REDIRECTS or location is None:
                return await _body(reply, ref, policy)
            url = reply.url.join(URL(location))
    raise MediaFetchFailed(f"{short(ref)} redirects over {MAX_REDIRECTS} times: pass its final URL")


async def _body(reply: aiohttp.ClientResponse, ref: str, policy: MediaPolicy) -> bytes:
    if reply.status != 200:
        raise MediaFetchFailed(f"{short(ref)} answered HTTP {reply.status}: check the URL")
    if not reply.content_type.startswith("image/"):
        raise MediaUnsupported(f"{short(ref)} is {reply.content_type!r}: pass the URL of an image")
    check_bytes(reply.content_length or 0, ref, policy)
    data = bytearray()
    async for chunk in reply.content.iter_chunked(_CHUNK_BYTES):
        data += chunk
        check_bytes(len(data), ref, policy)
    return bytes(data)


class _CheckedResolver(AbstractResolver):
    """The system's resolver, with every address of a name checked before any is used."""

    def __init__(self, policy: MediaPolicy) -> None:
        self._policy = policy

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await ThreadedResolver().resolve(host, port, family)
        for result in found:
            _check_address(result["host"], host, self._policy)
        return found

    async def close(self) -> None:
        return None


def _check_url(url: URL, policy: MediaPolicy) -> None:
    if url.scheme not in ("http", "https") or not url.host:
        raise MediaUnsupported(f"URL {short(str(url))}: pass http(s)://host/...")
    try:
        ipaddress.ip_address(url.host)
    except ValueError:
        return  # a name, which the resolver checks
    _check_address(url.host, url.host, policy)


def _check_address(address: str, host: str, policy: MediaPolicy) -> None:
    if not policy.allow_private_urls and not is_public(address):
        raise MediaForbidden(f"{short(host)} leads to an address that is not public: allow private URLs to use it")


def is_public(address: str) -> bool:
    """False for a private, loopback, link-local, shared, multicast or reserved address, also one wrapped in IPv6."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip.sixtofour or ip.teredo or ip in _NAT64 or ip.is_site_local:
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)
