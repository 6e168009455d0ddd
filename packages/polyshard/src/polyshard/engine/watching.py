"""Tells observers of units what they ask for; a unit that nobody watches has nothing here."""

from __future__ import annotations

from collections.abc import Iterable

from polyshard.group.group import ParameterGroup
from polyshard.seams import StepObserver


class UnitWatch:
    """Pairs the begins and ends of one unit's computation for those who watch it."""

    def __init__(self, observers: tuple[StepObserver, ...]) -> None:
        """Nothing computes."""
        self._observers = observers
        self._forwards = 0
        self._in_backward = False

    @classmethod
    def of(cls, groups: Iterable[ParameterGroup]) -> UnitWatch | None:
        """For those who watch any of ``groups``, each once; ``None`` if nobody does."""
        found = {id(o): o for group in groups for o in group.meter.step_observers}
        return cls(tuple(found.values())) if found else None

    def begin_forward(self, unit: str) -> None:
        """A module runs."""
        self._forwards += 1
        for observer in self._observers:
            observer.on_forward(unit)

    def end_forward(self, unit: str) -> None:
        """It has ended; nothing to tell where that was told already."""
        if self._forwards:
            self._forwards -= 1
            for observer in self._observers:
                observer.on_forward_end(unit)

    def begin_backward(self, unit: str) -> None:
        """Its backward computes."""
        self._in_backward = True
        for observer in self._observers:
            observer.on_backward(unit)

    def end_backward(self, unit: str) -> None:
        """It has ended, if it was on."""
        if self._in_backward:
            self._in_backward = False
            for observer in self._observers:
                observer.on_backward_end(unit)


def end_backward(watch: UnitWatch | None, unit: str) -> None:
    """What ``unit`` computed in backward is there, for those who watch."""
    if watch is not None:
        watch.end_backward(unit)


def tell_step_end(groups: Iterable[ParameterGroup]) -> None:
    """Tell every observer once, however many groups it watches."""
    found = {id(o): o for group in groups for o in group.meter.observers}
    for observer in found.values():
        observer.on_step_end()


def tell_broken(groups: Iterable[ParameterGroup]) -> None:
    """Tell every observer that asks once that the step was broken off."""
    found = {id(o): o for group in groups for o in group.meter.step_observers}
    for observer in found.values():
        observer.on_broken()
