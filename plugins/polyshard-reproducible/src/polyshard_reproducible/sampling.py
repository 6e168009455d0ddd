"""Which samples a slot sees."""

from __future__ import annotations

import torch

from polyshard_reproducible.errors import ReproducibleError
from polyshard_reproducible.randomness import seed_of


class SlotSampler:
    """Gives slot ``s`` of step ``t`` the same samples at every world size, and after a resume.

    It keeps no position, so there is nothing to save: the number of the step says everything.
    Every slot gets ``batch_size`` samples; what an epoch leaves over of a whole step is left out,
    other samples in each epoch.
    """

    def __init__(
        self, samples: int, batch_size: int, slots: int, *, seed: int = 0, shuffle: bool = True
    ) -> None:
        """Divide ``samples`` of a data set over steps of ``slots`` batches of ``batch_size``.

        Raises:
            ReproducibleError: when they do not fill one step.
        """
        self.steps_per_epoch = samples // max(batch_size * slots, 1)
        if min(batch_size, slots) < 1 or not self.steps_per_epoch:
            raise ReproducibleError(
                f"SlotSampler: {samples} samples do not fill one step of {slots} slots of "
                f"{batch_size} samples; give fewer slots, or a smaller batch_size."
            )
        self._samples = samples
        self._batch_size = batch_size
        self._slots = slots
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, torch.Tensor] | None = None

    def indices(self, step: int, slot: int) -> list[int]:
        """The samples of one slot; steps count over epochs.

        Raises:
            ReproducibleError: for a slot or a step that there is not.
        """
        if not (0 <= slot < self._slots and step >= 0):
            raise ReproducibleError(
                f"SlotSampler: there is no slot {slot} of step {step}; slots are 0 to "
                f"{self._slots - 1}, steps count from 0."
            )
        epoch, within = divmod(step, self.steps_per_epoch)
        start = (within * self._slots + slot) * self._batch_size
        found: list[int] = self._order_of(epoch)[start : start + self._batch_size].tolist()
        return found

    def _order_of(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            epoch = 0
        if self._order is None or self._order[0] != epoch:
            order = torch.arange(self._samples, device="cpu")
            if self._shuffle:
                generator = torch.Generator().manual_seed(seed_of(self._seed, epoch))
                order = torch.randperm(self._samples, generator=generator, device="cpu")
            self._order = (epoch, order)
        return self._order[1]
