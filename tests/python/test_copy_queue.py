"""The copy queue from Python: pools, pages of the host tier, threads, lifetimes."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch

from kvspan import _core
from kvspan.host import CopyQueue, HostTier


def make_pool(num_blocks: int = 6) -> torch.Tensor:
    """``[num_blocks, block_size, num_kv_heads, head_dim]``, bfloat16, no two elements alike."""
    return torch.arange(num_blocks * 4 * 2 * 8).to(torch.bfloat16).reshape(num_blocks, 4, 2, 8)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
def test_blocks_of_all_layers_through_the_host_tier(num_threads: int, chunk_bytes: int) -> None:
    pools = [make_pool(), make_pool().permute(0, 2, 1, 3), make_pool()[..., :5]]
    before = [pool.clone() for pool in pools]
    blocks = np.array([4, 0, 3])
    nbytes = sum(3 * pool[0].numel() * 2 for pool in pools)
    with (
        HostTier(1 << 16, page_bytes=64) as tier,
        CopyQueue(chunk_bytes=chunk_bytes, num_threads=num_threads) as queue,
    ):
        reservation = tier.reserve(b"span", nbytes, cost=1)
        assert reservation is not None
        job = queue.submit([(pool, blocks) for pool in pools], reservation.pages)
        assert job.wait() is True and job.state == "done" and job.bytes_done == nbytes
        reservation.commit()
        for pool in pools:
            pool[blocks] = -1
        view = tier.view(b"span")
        assert view is not None
        job = queue.submit(view.pages, [(pool, blocks) for pool in pools])
        assert job.wait() is True
        view.release()
        assert queue.stats()["bytes_done"] == 2 * nbytes
    for pool, expected in zip(pools, before, strict=True):
        torch.testing.assert_close(pool, expected, rtol=0, atol=0)


def test_chunks_of_a_slow_copy_come_one_by_one() -> None:
    src, dst = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    with CopyQueue(chunk_bytes=16, bytes_per_second=2000) as queue:
        job = queue.submit([src], [dst])
        assert job.num_chunks == 4
        for done in range(1, 5):
            assert job.wait(done) is True
            assert job.num_done >= done and (dst[: 16 * done] == src[: 16 * done]).all()
        assert job.wait_on_stream(0) is True


def test_cancel_and_time_that_is_not_enough() -> None:
    src, dst = np.ones(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    with CopyQueue(chunk_bytes=1000, bytes_per_second=20_000) as queue:
        job = queue.submit([src], [dst])
        assert job.wait(timeout=0.001) is None and job.state == "pending"
        job.cancel()
        assert job.wait() is False and job.state == "cancelled"
        assert dst[-1] == 0
        assert queue.stats()["bytes_queued"] == 0


def test_the_urgent_goes_first_and_what_is_too_much_is_refused() -> None:
    src = np.ones(1000, np.uint8)
    dsts = [np.zeros(1000, np.uint8) for _ in range(3)]
    with CopyQueue(chunk_bytes=10, bytes_per_second=5000, max_bytes_queued=2000) as queue:
        late = queue.submit([src], [dsts[0]])
        urgent = queue.submit([src], [dsts[1]], priority=-1)
        assert queue.try_submit([src], [dsts[2]]) is None
        assert urgent.wait() is True
        assert late.state == "pending", "overtaken"
        late.cancel()


def test_tensors_live_until_the_job_is_settled() -> None:
    queue = CopyQueue(chunk_bytes=8, bytes_per_second=10_000)
    src = np.ones(256, np.uint8)
    alive = weakref.ref(src)
    job = queue.submit([src], [np.zeros(256, np.uint8)])
    del job, src
    gc.collect()
    assert alive() is not None
    queue.close()
    gc.collect()
    assert alive() is None


def test_closed_while_others_wait() -> None:
    queue = CopyQueue(chunk_bytes=8, bytes_per_second=1000)
    job = queue.submit([np.ones(4096, np.uint8)], [np.zeros(4096, np.uint8)])
    answers: list[bool | None] = []
    thread = threading.Thread(target=lambda: answers.append(job.wait()))
    thread.start()
    queue.close()
    queue.close()
    thread.join()
    assert answers == [False]
    with pytest.raises(ValueError, match="this copy queue is closed"):
        queue.submit([], [])


def test_errors() -> None:
    src, dst = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    read_only = np.zeros(8, np.uint8)
    read_only.flags.writeable = False
    with CopyQueue() as queue:
        assert queue.submit([read_only], [dst]).wait() is True
        with pytest.raises(ValueError, match=r"dst\[0\]: expected a writable tensor"):
            queue.submit([src], [read_only])
        with pytest.raises(ValueError, match="dst: expected 8 bytes like src, got 7"):
            queue.submit([src], [dst[:7]])
        with pytest.raises(ValueError, match=r"src\[1\]: expected blocks in \[0, 6\), got 6"):
            queue.submit([src, (make_pool(), [6])], [dst])
        with pytest.raises(TypeError, match=r"src\[0\]: expected a numpy array or a tensor"):
            queue.submit(["x"], [dst])
        with pytest.raises(ValueError, match="num_chunks: expected -1 to 1, got 2"):
            queue.submit([src], [dst]).wait(2)
    for device in ("gpu", "cuda:", "cuda:x", "cuda:-1"):
        with pytest.raises(ValueError, match="device: expected cpu, cuda or cuda:<index>"):
            CopyQueue(device)
    with pytest.raises(ValueError, match="chunk_bytes: expected 1 or more, got 0"):
        CopyQueue(chunk_bytes=0)
    if _core.cuda_device_count() == 0:
        with pytest.raises(RuntimeError, match=r"no CUDA device|built without CUDA"):
            CopyQueue("cuda")
        with pytest.raises(RuntimeError, match=r"no CUDA device|built without CUDA"):
            HostTier(1 << 16, page_locked=True)
