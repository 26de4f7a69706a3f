"""Real vLLM on CPU with tiny models of random weights. Runs in an environment with vLLM.

KVSPAN_VLLM_RUNNER=v2 runs tests under Model Runner V2, several times as slow.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
sys.path.insert(0, str(Path(__file__).parent.parent / "python"))
if importlib.util.find_spec("torchvision") is None:
    stubs = str(Path(__file__).parent / "stubs")
    sys.path.insert(0, stubs)
    # vLLM looks into a model's class in a process of its own.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [stubs, os.environ.get("PYTHONPATH")]))

if os.environ.get("KVSPAN_VLLM_RUNNER") == "v2":
    import runner_v2  # noqa: F401

import pytest
from served import BLOCK, Served, save_tiny
from span_hosted import counting, small


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def served(model_folder: Path) -> Served:
    served = Served.shared(model_folder, num_blocks=400, max_num_batched_tokens=2048)
    assert served.block_size == BLOCK
    return served


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def hosted(llama: Path) -> Served:
    return small(llama)


@pytest.fixture
def counted() -> Iterator[Counter[str]]:
    with counting() as total:
        yield total


@pytest.fixture(scope="session", autouse=True)
def _close_last() -> Iterator[None]:
    yield
    Served.close_live()
