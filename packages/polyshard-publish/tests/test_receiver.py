"""What a receiver serves: one version whole, whatever comes, and in which order."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from publish_runs import receiving, rounded, same_bits, small, step
from torch import Tensor, nn

from polyshard.errors import SettingError
from polyshard_publish import (
    CatalogueError,
    GoneError,
    ProofError,
    Publisher,
    PublishError,
    Receiver,
    ReceiverServer,
    SocketTarget,
    VersionError,
)
from polyshard_publish.blocks import Block
from polyshard_publish.digests import digest_of, summary
from polyshard_publish.patches import Patch
from polyshard_publish.pieces import Entry
from polyshard_publish.wire import Have, Update

OLD, NEW = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3) + 10
CATALOGUE = {"w": Entry("F32", (2, 3)), "v": Entry("F32", (4,))}
V = torch.zeros(4)


def receiver_with_old() -> Receiver:
    return Receiver({"w": OLD.clone(), "v": V.clone()}, version=3)


def update(version: int = 4, nonce: str = "a", ranks: int = 1) -> Update:
    return Update(version, None, ranks, nonce, CATALOGUE)


def send(receiver: Receiver, nonce: str, tensor: Tensor = NEW, rows: slice = slice(0, 2)) -> None:
    part = tensor[rows]
    patch = Patch.whole("w", Block((rows.start, 0), tuple(part.shape)), part)
    _stage(receiver, nonce, patch)


def _stage(receiver: Receiver, nonce: str, patch: Patch) -> None:
    content = memoryview(bytearray(b"".join(patch.content())))
    receiver.stage(nonce, patch.head(), content)


def send_v(receiver: Receiver, nonce: str) -> None:
    _stage(receiver, nonce, Patch.whole("v", Block((0,), (4,)), V))


def digests(w: Tensor = NEW) -> dict[str, int]:
    return {"w": digest_of(w), "v": digest_of(V)}


def said() -> list[int]:
    """Digests as they travel: by sorted name."""
    return [digest for _, digest in sorted(digests().items())]


def serves(receiver: Receiver, version: int, w: Tensor) -> bool:
    with receiver.serving() as served:
        return served.version == version and torch.equal(served.tensors["w"], w)


def test_a_version_is_served_from_its_commit_on() -> None:
    receiver = receiver_with_old()
    receiver.begin(update())
    send(receiver, "a")
    send_v(receiver, "a")
    receiver.end("a", 0)
    assert serves(receiver, 3, OLD)
    receiver.commit("a", said())
    assert serves(receiver, 4, NEW)


def test_parameters_take_columns() -> None:
    """Writes of parts of rows go through a view, which autograd refuses of a leaf."""
    weight = nn.Parameter(OLD.clone())
    receiver = Receiver({"w": weight, "v": V.clone()}, version=3)
    receiver.begin(update())
    for columns in (slice(0, 2), slice(2, 3)):
        part = NEW[:, columns].contiguous()
        block = Block((0, columns.start), tuple(part.shape))
        _stage(receiver, "a", Patch.whole("w", block, part))
    send_v(receiver, "a")
    receiver.end("a", 0)
    receiver.commit("a", said())
    assert serves(receiver, 4, NEW)
    assert torch.equal(weight, NEW)  # in place


def test_other_values_than_were_sent_name_the_tensor_and_leave_the_old() -> None:
    receiver = receiver_with_old()
    receiver.begin(update())
    wrong = NEW.clone()
    wrong[1, 2] += 1
    send(receiver, "a", wrong)
    send_v(receiver, "a")
    receiver.end("a", 0)
    with pytest.raises(ProofError, match=r"other values than it was sent with in 'w'; version 3"):
        receiver.commit("a", said())
    assert serves(receiver, 3, OLD)
    assert receiver.have == Have(3, summary(digests(OLD)))


def test_a_version_needs_all_ranks_and_all_elements() -> None:
    receiver = receiver_with_old()
    receiver.begin(update(ranks=2))
    receiver.begin(update(ranks=2), rank=1)
    send(receiver, "a", rows=slice(0, 1))
    receiver.end("a", 0)
    with pytest.raises(VersionError, match=r"lacks the tensors of ranks \[1\]"):
        receiver.commit("a", said())
    receiver.end("a", 1)
    with pytest.raises(ProofError, match=r"3 of 6 elements of 'w'"):
        receiver.commit("a", said())
    assert serves(receiver, 3, OLD)


def test_versions_out_of_order_are_refused_by_name() -> None:
    receiver = receiver_with_old()
    with pytest.raises(VersionError, match=r"version 3 is served already; version 3 stays"):
        receiver.begin(update(3))
    with pytest.raises(VersionError, match=r"version 2 is older than 3; version 3 stays"):
        receiver.begin(update(2))
    receiver.begin(update(7, "b"))
    with pytest.raises(VersionError, match=r"version 5 is late: version 7 is on its way"):
        receiver.begin(update(5, "c"))
    with pytest.raises(VersionError, match=r"made from version 2 .* but version 3 with"):
        receiver.begin(replace(update(8, "d"), base=Have(2, 0)))
    with pytest.raises(VersionError, match=r"made from version 3 with digest 5, but version 3"):
        receiver.begin(replace(update(8, "d"), base=Have(3, 5)))


def test_a_newer_version_replaces_one_that_never_ended() -> None:
    """What still comes of the first is refused."""
    receiver = receiver_with_old()
    receiver.begin(update(4, "dead"))
    send(receiver, "dead")
    receiver.begin(update(5, "next"))
    with pytest.raises(VersionError, match=r"withdrawn; 5 is on its way, version 3 served"):
        receiver.end("dead", 0)
    with pytest.raises(VersionError, match="withdrawn"):
        receiver.begin(update(4, "dead"), rank=1)
    receiver.abandon("dead")  # its connection ends late, and takes nothing along
    send(receiver, "next")
    send_v(receiver, "next")
    receiver.end("next", 0)
    receiver.commit("next", said())
    assert serves(receiver, 5, NEW)


def test_weights_do_not_change_while_they_are_read() -> None:
    receiver = receiver_with_old()
    receiver.begin(update())
    send(receiver, "a")
    send_v(receiver, "a")
    receiver.end("a", 0)
    with receiver.serving() as served:
        committing = threading.Thread(target=receiver.commit, args=("a", said()))
        committing.start()
        committing.join(0.2)
        assert committing.is_alive()
        assert torch.equal(served.tensors["w"], OLD)
    committing.join(30)
    assert serves(receiver, 4, NEW)


def test_patches_of_other_tensors_and_places_are_refused() -> None:
    for patch, message in [
        (Patch.whole("x", Block((0,), (2,)), V[:2]), "'x' is unknown"),
        (Patch.whole("v", Block((3,), (2,)), V[:2]), r"'v' \[4\] has no elements at \(3,\)"),
        (Patch.whole("v", Block((0, 0), (2, 1)), V[:2]), "'v' .* has no elements"),
    ]:
        receiver = receiver_with_old()
        receiver.begin(update())
        _stage(receiver, "a", patch)
        with pytest.raises(CatalogueError, match=message):
            receiver.end("a", 0)
        with pytest.raises(VersionError, match="lacks the tensors of ranks"):
            receiver.commit("a", said())
        assert serves(receiver, 3, OLD)


def test_nothing_is_served_before_the_first_version() -> None:
    receiver = Receiver()
    with pytest.raises(PublishError, match="nothing was published yet"), receiver.serving():
        pass
    with pytest.raises(GoneError, match="version 1 did not come within 0 s; nothing is served"):
        receiver.wait(1, 0.01)
    with pytest.raises(CatalogueError, match="'w' is not contiguous"):
        Receiver({"w": OLD.t()})


# From a publisher of one process ----------------------------------------------------------------


def test_what_is_served_is_the_model_rounded_once() -> None:
    model = small()
    with (
        receiving() as (receiver, address),
        Publisher(model, to=address, dtype=torch.bfloat16, keep="values") as publisher,
    ):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
        for version in range(3):
            published = publisher.publish(version)
            assert published.patched == ((address,) if version else ())
            wanted = rounded(model.state_dict(), torch.bfloat16)
            del wanted["head.weight"]  # tied: under its first name
            with receiver.serving() as served:
                assert served.version == version
                assert served.tensors.keys() == wanted.keys()
                for name, tensor in wanted.items():
                    assert same_bits(served.tensors[name], tensor), name
            step(model, optimizer)
            model.count += 1


@pytest.mark.parametrize("keep", ["digests", "values"])
def test_nothing_travels_where_nothing_changed(keep: str) -> None:
    model = small()
    with (
        receiving() as (receiver, address),
        Publisher(
            model,
            to=address,
            dtype=torch.bfloat16,
            keep=keep,  # type: ignore[arg-type]
        ) as publisher,
    ):
        publisher.publish(1)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        step(model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0))
        published = publisher.publish(2)
        assert published.value_bytes == 0
        assert receiver.have.version == 2
        with receiver.serving() as served:
            assert not served.changed
        model.blocks[1].bias.data[3] += 1
        published = publisher.publish(3)
        assert published.value_bytes == (37 * 2 + 1 if keep == "digests" else 4)
        with receiver.serving() as served:
            assert served.changed == {"blocks.1.bias"}
        assert torch.equal(before["table"], model.table)


def test_a_version_whose_sender_has_given_up_is_not_served_later() -> None:
    model = nn.Linear(3, 2)
    with receiving() as (receiver, address):
        publisher = Publisher(model, to=SocketTarget(address, timeout_seconds=3.0))
        publisher.publish(1)
        with receiver.serving(), pytest.raises(GoneError):
            publisher.publish(2)
        with pytest.raises(GoneError, match="version 2 did not come within 1 s"):
            receiver.wait(2, 0.6)
        assert receiver.have.version == 1
        publisher.publish(2)
        assert receiver.have.version == 2


def test_another_model_is_refused_and_the_old_weights_stay() -> None:
    model = small()
    with receiving() as (receiver, address):
        Publisher(model, to=address).publish(1)
        before = receiver.have
        for other, dtype, message in [
            (
                nn.Linear(3, 3),
                None,
                r"'bias' is unknown to the receiver; .* 'blocks.0.bias' is not sent",
            ),
            (small(), torch.bfloat16, r"'blocks.0.bias' is BF16 \[37\], the receiver's F32 \[37\]"),
        ]:
            with pytest.raises(CatalogueError, match=message):
                Publisher(other, to=address, dtype=dtype).publish(2)
        missing = Publisher(model, to=address, names=lambda n: None if "norm" in n else n)
        with pytest.raises(CatalogueError, match=r"'norm\.bias' is not sent"):
            missing.publish(2)
        assert receiver.have == before


def test_a_receiver_with_room_says_what_it_takes() -> None:
    model = nn.Linear(3, 2)
    room = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    with receiving(Receiver(room)) as (_, address):
        Publisher(model, to=address).publish(1)
        assert torch.equal(room["weight"], model.weight)  # in place
        with pytest.raises(CatalogueError, match="F16"):
            Publisher(model, to=address, dtype=torch.float16).publish(2)


def test_a_receiver_that_is_gone_is_named_and_others_go_on() -> None:
    model = nn.Linear(3, 2)
    with receiving() as (receiver, address):
        with receiving() as (_, other):
            publisher = Publisher(model, to=[address, other], keep="values")
            publisher.publish(1)
        with pytest.raises(GoneError, match=rf"1 other receivers serve it. {other}: .*refused"):
            publisher.publish(2)
        assert receiver.have.version == 2
        with pytest.raises(GoneError, match=other):
            publisher.served()


def test_a_receiver_that_lost_its_weights_gets_all_of_them() -> None:
    model = nn.Linear(3, 2)
    with receiving() as (_, address):
        publisher = Publisher(model, to=address, keep="values")
        publisher.publish(1)
        port = int(address.rpartition(":")[2])
    with ReceiverServer(Receiver(), port=port) as server:
        assert publisher.served() == {address: None}
        assert publisher.publish(2).patched == ()
        assert publisher.publish(3).patched == (address,)
        assert server.receiver.have.version == 3


def test_a_refused_version_costs_no_patch() -> None:
    with receiving() as (_, address):
        publisher = Publisher(nn.Linear(3, 2), to=address)
        publisher.publish(5)
        with pytest.raises(VersionError, match="version 5 is served already"):
            publisher.publish(5)
        assert publisher.publish(6).patched == (address,)


def test_strangers_change_nothing() -> None:
    """A wrong token, another protocol, frames out of order: said, and nothing else."""
    model = nn.Linear(3, 2)
    with ReceiverServer(Receiver(), token="secret") as server:
        with pytest.raises(PublishError, match="the token is not this receiver's"):
            Publisher(model, to=server.address).publish(1)
        Publisher(model, to=SocketTarget(server.address, token="secret")).publish(1)
        host, _, port = server.address.rpartition(":")
        for said in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"PSW1" + b"\xff" * 12,
            b"PSW1\2\0\0\0" + b"\0" * 8 + b"[]",
        ):
            with socket.create_connection((host, int(port)), 5) as stranger:
                stranger.settimeout(5)
                stranger.sendall(said)
                with suppress(OSError):  # it may have hung up already
                    stranger.shutdown(socket.SHUT_WR)
                    assert stranger.recv(10) == b""
        assert server.receiver.have.version == 1


def test_settings_are_checked() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(SettingError, match="keep='all'"):
        Publisher(model, to="x:1", keep="all")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="at least one receiver"):
        Publisher(model, to=[])
    with pytest.raises(SettingError, match="to=7"):
        Publisher(model, to=7)
    with pytest.raises(PublishError, match="'nowhere' is no address"):
        Publisher(model, to="nowhere").publish(1)
    for version in (-1, 1.5, "2"):
        with pytest.raises(SettingError, match="versions are whole numbers"):
            Publisher(model, to="x:1").publish(version)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"torch.int8, which cannot hold torch.float32"):
        Publisher(model, to="x:1", dtype=torch.int8)
    with pytest.raises(CatalogueError, match="cannot be published"):
        Publisher(nn.Linear(3, 2, dtype=torch.complex128), to="x:1")


def test_the_rate_is_held() -> None:
    """200,000 bytes at a million a second take a fifth of a second."""
    model = nn.Linear(200, 250, bias=False)
    with receiving() as (_, address):
        target = SocketTarget(address, bytes_per_second=1e6)
        assert Publisher(model, to=target).publish(1).seconds >= 0.2
