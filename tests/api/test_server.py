from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from firepool_broker.api.server import AddressUnusable, tcp_sockets, unix_socket


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s") / "socket"


def test_only_its_owner_may_connect(place: Path) -> None:
    before = os.umask(0)
    os.umask(before)
    listening = unix_socket(place)
    assert place.stat().st_mode & 0o777 == 0o600
    assert os.umask(before) == before, "the umask is as it was"
    listening.close()


def test_what_a_dead_broker_left_is_replaced(place: Path) -> None:
    unix_socket(place).close()
    assert place.exists()
    unix_socket(place).close()


def test_a_living_broker_is_left_alone(place: Path) -> None:
    with unix_socket(place), pytest.raises(AddressUnusable, match="another broker"):
        unix_socket(place)


def test_another_kind_of_file_is_left_alone(place: Path) -> None:
    place.write_text("precious")
    with pytest.raises(AddressUnusable, match="no socket"):
        unix_socket(place)
    assert place.read_text() == "precious"


def test_a_path_that_is_too_long_names_the_fix(tmp_path: Path) -> None:
    with pytest.raises(AddressUnusable, match="FIREPOOL_HOME"):
        unix_socket(tmp_path / ("x" * 120))


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressUnusable, match=str(port)):
            tcp_sockets("127.0.0.1", port)
