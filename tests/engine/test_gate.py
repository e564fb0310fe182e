"""When the gate is computed inside its product, and with which tiles."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from upshot.engine.kernels.gate import LARGE, MIDDLE, SMALL, Tile, tile_for


@pytest.mark.parametrize(
    ("rows", "width", "n", "expected"),
    [
        (1, 2048, 8192, None),
        (64, 2048, 8192, SMALL),
        (128, 2048, 8192, MIDDLE),
        (256, 2048, 8192, LARGE),
        (384, 2048, 8192, None),
        (1024, 2048, 8192, LARGE),
        (16384, 2048, 8192, LARGE),
        (128, 2048, 6144, None),
        (256, 576, 1536, SMALL),
        (512, 576, 1536, MIDDLE),
        (16384, 576, 1536, LARGE),
        (1024, 4096, 14336, None),
        (1024, 2048, 8191, None),
        (1024, 2044, 8192, None),
    ],
)
def test_tiles_are_those_that_measured_best_on_132_multiprocessors(
    rows: int, width: int, n: int, expected: Tile | None
) -> None:
    assert tile_for(rows, width, n, 132) == expected
