"""``@ranks(2)``: a test that runs on real ranks, in one function; errors it expects there."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from polyshard.errors import PeerError


def ranks(*sizes: int, timeout: float = 150.0) -> Callable[[Callable[..., None]], Any]:
    """Run the decorated test on ``sizes`` ranks, once for each size, in the session's worlds.

    The function takes ``rank`` and ``size`` first; what follows are parameters of
    ``pytest.mark.parametrize`` or fixtures, and must be picklable. It runs in the ranks' processes,
    so ``monkeypatch`` and the like reach nothing there. Example::

        @ranks(2, 3)
        @pytest.mark.parametrize("bias", [True, False])
        def test_gradients_are_means(rank: int, size: int, bias: bool) -> None: ...

    Args:
        sizes: numbers of ranks; the fixtures ``world1`` to ``world4`` hold them.
        timeout: seconds after which ranks that have not answered count as hung.

    Raises:
        TypeError: for a function whose first parameters are not ``rank`` and ``size``.
    """

    def decorate(function: Callable[..., None]) -> Any:
        names = list(inspect.signature(function).parameters.values())
        if [p.name for p in names[:2]] != ["rank", "size"]:
            raise TypeError(
                f"@ranks needs a function of (rank, size, ...); {function.__name__} takes "
                f"{[p.name for p in names]}"
            )

        @functools.wraps(function)
        def test(request: pytest.FixtureRequest, world_size: int, **given: Any) -> None:
            world = request.getfixturevalue(f"world{world_size}")
            world.run(function, *(given[p.name] for p in names[2:]), timeout=timeout)
            world.rest()

        wanted = ("request", "world_size")
        own = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in wanted]
        setattr(test, "__signature__", inspect.Signature([*own, *names[2:]]))  # noqa: B010
        ids = [f"{size} ranks" if size > 1 else "1 rank" for size in sizes]
        return pytest.mark.parametrize("world_size", sizes, ids=ids)(test)

    return decorate


def raises_in_step(error: type[Exception], match: str) -> pytest.RaisesExc[Exception]:
    """``pytest.raises`` for an error that every rank raises by itself in a step.

    A slower rank may first learn of another rank's failure. It then correctly raises ``PeerError``,
    which quotes that rank's error. ``pytest --late-rank=N`` finds tests that need this.

    Args:
        error: class of the error, raised or quoted.
        match: a regular expression, found in either message.
    """
    return pytest.raises(
        (error, PeerError),
        match=match,
        check=lambda raised: isinstance(raised, error) or _quotes(str(raised), error),
    )


def _quotes(text: str, error: type[Exception]) -> bool:
    return any(f"{kind.__name__}: " in text for kind in _kinds(error))


def _kinds(error: type[Exception]) -> Iterator[type[Exception]]:
    yield error
    for kind in error.__subclasses__():
        yield from _kinds(kind)
