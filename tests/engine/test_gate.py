"""When the gate is fused into its product, and with which tiles."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from upshot.engine.kernels.gate import LARGE, MIDDLE, SMALL, Tile, gated_tile, tile_for


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


@pytest.mark.parametrize(("shared", "expected"), [(232_448, SMALL), (166_912, None), (101_376, None)])
def test_without_the_shared_memory_of_a_large_gpu_the_library_is_used(
    shared: int, expected: Tile | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An RTX 5090 is newer than an H200 but has less than half its shared memory."""
    monkeypatch.setattr("upshot.engine.kernels.gate.shared_memory", lambda device: shared)
    monkeypatch.setattr("upshot.engine.kernels.gate.processors", lambda device: 132)
    x = SimpleNamespace(is_cuda=True, element_size=lambda: 2, shape=(64, 2048), device="cuda")
    assert gated_tile(x, SimpleNamespace(shape=(16384, 2048))) == expected  # type: ignore[arg-type]
