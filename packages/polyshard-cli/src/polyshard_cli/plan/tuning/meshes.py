"""Meshes of as many ranks: replicas, shards and tensor-parallel ranks in all sizes that divide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from polyshard_cli.plan.request.mesh import Axis, MeshSpec, Role

NAMES: dict[Role, str] = {"replicate": "replicate", "tensor": "tp"}


def divisors(number: int) -> tuple[int, ...]:
    """All of them, from 1 to ``number``."""
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def meshes_of(
    given: MeshSpec, tensor_sizes: Iterable[int], *, keeps_replicas: bool = False
) -> tuple[MeshSpec, ...]:
    """``given``, then every other mesh of its ranks, small axes beside the shards first.

    Args:
        given: names the axes; those of one rank are left out of others.
        tensor_sizes: ranks of tensor parallelism to try; those that do not divide are left out.
        keeps_replicas: whether the number of replicas stays as it is.
    """
    return tuple(dict.fromkeys([given, *_others(given, sorted(tensor_sizes), keeps_replicas)]))


def _others(
    given: MeshSpec, tensor_sizes: Iterable[int], keeps_replicas: bool
) -> Iterator[MeshSpec]:
    for tensor in tensor_sizes:
        if given.ranks % tensor:
            continue
        data = given.ranks // tensor
        counts = (given.size("replicate"),) if keeps_replicas else divisors(data)
        for replicas in counts:
            if data % replicas == 0:
                yield _mesh(given, replicas, data // replicas, tensor)


def _mesh(given: MeshSpec, replicas: int, shards: int, tensor: int) -> MeshSpec:
    axes = [
        _axis(given, "replicate", replicas),
        Axis(given.name("shard"), shards, "shard"),
        _axis(given, "tensor", tensor),
    ]
    if given.name("shard").startswith("dp_"):
        axes[0] = _axis(given, "replicate", replicas, "dp_replicate")
    return MeshSpec(tuple(axis for axis in axes if axis.size > 1 or axis.role == "shard"))


def _axis(given: MeshSpec, role: Role, size: int, name: str = "") -> Axis:
    return Axis(given.name(role) or name or NAMES[role], size, role)
