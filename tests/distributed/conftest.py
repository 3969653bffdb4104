"""The ranks that distributed tests run on: one launch per W, used by all tests of that W."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ranks.pool import RankPool, available


class _Pools:
    """At most one pool lives at a time: tests of one W run one after another."""

    def __init__(self) -> None:
        self._pool: RankPool | None = None

    def get(self, world_size: int) -> RankPool:
        if self._pool is None or self._pool.world_size != world_size:
            self.close()
            self._pool = RankPool(world_size)
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None


@pytest.fixture(scope="session")
def pools() -> Iterator[_Pools]:
    pools = _Pools()
    yield pools
    pools.close()


@pytest.fixture
def ranks(pools: _Pools) -> Callable[[int], RankPool]:
    """``ranks(4)`` is the pool of four ranks."""

    def get(world_size: int) -> RankPool:
        if not available(world_size):
            pytest.skip(f"needs {world_size} CUDA devices")
        return pools.get(world_size)

    return get


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of a W together, whatever file they're in, so that its ranks are started once."""
    here = [i for i, item in enumerate(items) if item.path.parent.name in ("distributed", "gpu")]
    ordered = sorted((items[i] for i in here), key=_world_size)
    for i, item in zip(here, ordered, strict=True):
        items[i] = item


def _world_size(item: pytest.Item) -> int:
    callspec = getattr(item, "callspec", None)
    return 0 if callspec is None else int(callspec.params.get("world_size", 0))
