"""The kernel's count of bytes sent is that of what was sent."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from polyshard_cli.compare.training.wire import sent_between, sent_so_far


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    client, accepted = pair()
    with closing(client), closing(accepted):
        yield client, accepted


def send(sender: socket.socket, receiver: socket.socket, count: int) -> None:
    sender.sendall(b"x" * count)
    while count:
        count -= len(receiver.recv(count))


@pytest.mark.skipif(sent_so_far() is None, reason="this system does not count")
def test_bytes_of_old_and_of_new_connections(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    client, accepted = connection
    send(client, accepted, 5000)
    before = sent_so_far()
    send(client, accepted, 1000)
    send(accepted, client, 30)
    new, other = pair()
    with closing(new), closing(other):
        send(new, other, 7)
        assert sent_between(before, sent_so_far()) == 1037  # both ends are this process'


@pytest.mark.skipif(sent_so_far() is None, reason="this system does not count")
def test_sockets_of_other_kinds_do_not_count() -> None:
    one, other = socket.socketpair()
    with closing(one), closing(other):
        before = sent_so_far()
        send(one, other, 100)
        assert sent_between(before, sent_so_far()) == 0


def test_what_is_not_known_stays_unknown() -> None:
    assert sent_between(None, {}) is None
    assert sent_between({}, None) is None
