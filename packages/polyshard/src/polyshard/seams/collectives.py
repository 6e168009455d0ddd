"""How bytes move, as a plugin decides it; see :mod:`polyshard.transport` for what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from polyshard.seams.base import Named

if TYPE_CHECKING:
    from polyshard.sharding.mesh import MeshRoles
    from polyshard.transport.base import Transport


class CollectivesBackend(Named, ABC):
    """Decides how bytes move. Exclusive per group."""

    @abstractmethod
    def connect(self, roles: MeshRoles, device: torch.device) -> Transport:
        """A transport between the ranks of the shard axis."""
