"""SmolLM2, converted once for all slow tests of this folder."""

import multiprocessing
import os
from pathlib import Path

import pytest

from tests.engine.conftest import llama, make_llama, tokenizer  # noqa: F401
from upshot.models.smollm2 import FOLDER, smollm2_folder


def _convert(cache, out):
    os.environ["UPSHOT_CACHE"] = cache
    out.put(str(smollm2_folder()))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """The converted model, made by two processes at once in a fresh cache folder."""
    pytest.importorskip("gguf")
    cache = str(tmp_path_factory.mktemp("cache"))
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    workers = [context.Process(target=_convert, args=(cache, out)) for _ in range(2)]
    for worker in workers:
        worker.start()
    found = {out.get() for _ in workers}
    for worker in workers:
        worker.join()
    assert found == {str(Path(cache) / FOLDER)}
    assert sorted(p.name for p in Path(cache).iterdir()) == [FOLDER, f"{FOLDER}.lock"]
    return found.pop()
