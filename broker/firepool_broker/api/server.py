"""Sockets that the API listens on.

The contract: the Unix socket is reachable by its owner only from the moment it exists; a socket
file that a dead broker left is replaced, one that somebody still answers is not.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from tornado.httpserver import HTTPServer
from tornado.web import Application

_BODY_BYTES = 64 * 1024 * 1024
"""JSON bodies; uploads are streamed under limits of their own."""
_BACKLOG = 1024
_PATH_BYTES = 107  # of sockaddr_un, less its final NUL


class AddressUnusable(OSError):
    """The API cannot listen where it was told to."""


def make_server(application: Application) -> HTTPServer:
    """Return a server for the application; add sockets to it."""
    return HTTPServer(
        application,
        max_body_size=_BODY_BYTES,
        max_header_size=64 * 1024,
        idle_connection_timeout=24 * 3600.0,
        xheaders=False,
        decompress_request=False,
    )


def unix_socket(path: Path) -> socket.socket:
    """Listen on a Unix socket.

    Raises
    ------
    AddressUnusable
        The path is too long, is another kind of file, or a living process listens there.
    """
    if len(os.fsencode(path)) > _PATH_BYTES:
        raise AddressUnusable(
            f"{path} is longer than the {_PATH_BYTES} bytes that a socket's path may have; "
            "set FIREPOOL_HOME to a shorter folder"
        )
    try:
        left = path.lstat()
    except FileNotFoundError:
        pass
    else:
        if not stat.S_ISSOCK(left.st_mode):
            raise AddressUnusable(f"{path} exists and is no socket; move it away")
        if _answers(path):
            raise AddressUnusable(f"another broker listens on {path}")
        path.unlink()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        mask = os.umask(0o177)  # mode 0600 before the first connection could come
        try:
            listening.bind(str(path))
        finally:
            os.umask(mask)
        listening.setblocking(False)
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def tcp_sockets(host: str, port: int) -> list[socket.socket]:
    """Listen on a TCP address; port 0 takes a free one."""
    listening: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in found:
            if listening and port == 0:
                break  # a second family would get another free port
            one = socket.socket(family, kind, protocol)
            listening.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
            one.setblocking(False)
            one.listen(_BACKLOG)
    except OSError as error:
        for one in listening:
            one.close()
        raise AddressUnusable(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listening


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
