"""copy_blocks, and how tensors of all kinds reach the core."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from kvspan import ops, reference

SRC, DST = [4, 0, 0, 3], [1, 2, 4, 3]


def random_bytes(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.bool,
     torch.int32, torch.int64],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("is_hnd", [False, True], ids=["nhd", "hnd"])
def test_every_dtype_bit_for_bit(dtype: torch.dtype, is_hnd: bool) -> None:
    """Any bits, NaN among them, whatever they mean."""
    data = random_bytes(6, 4, 3, 40)
    if dtype is torch.bool:
        data %= 2
    src = data.view(dtype)
    dst = torch.full_like(data, 1).view(dtype)
    if is_hnd:
        src, dst = src.transpose(1, 2), dst.transpose(1, 2)
    before = dst.clone()
    ops.copy_blocks(src, dst, SRC, DST)
    expected = before.clone()
    expected.view(torch.uint8)[DST] = src.contiguous().view(torch.uint8)[SRC]
    assert torch.equal(dst.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("shape", [(6, 5), (6, 3, 5), (6, 2, 3, 5)], ids=["2-d", "3-d", "4-d"])
def test_dimensions(shape: tuple[int, ...]) -> None:
    src = torch.randn(*shape)
    dst = torch.zeros(*shape)
    ops.copy_blocks(src, dst, SRC, DST)
    assert torch.equal(dst[DST], src[SRC])
    assert not dst[[0, 5]].any()


@pytest.mark.parametrize("num_threads", [0, 1, 2, 7])
def test_within_one_pool(num_threads: int) -> None:
    pool = torch.randn(40, 4, 2, 8)
    src, dst = list(range(20)), list(range(39, 19, -1))
    expected = reference.move_blocks(pool, src, dst)
    ops.copy_blocks(pool, pool, src, dst, num_threads=num_threads)
    assert torch.equal(pool, expected)


def test_between_pools_of_different_sizes_and_layouts() -> None:
    src = torch.randn(3, 4, 2, 8)
    dst = torch.zeros(9, 2, 4, 8).transpose(1, 2)
    ops.copy_blocks(src, dst, torch.tensor([2, 1]), np.array([8, 0]))
    assert torch.equal(dst[[8, 0]], src[[2, 1]])


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        (torch.zeros(4), torch.zeros(4), r"src: expected shape .* 2 to 4 dimensions, got \[4\]"),
        (torch.zeros(4, 2), torch.zeros(4, 3), r"dst: expected blocks of the same shape as src"),
        (torch.zeros(4, 2, 2), torch.zeros(4, 4), r"dst: expected shape|dst: expected blocks"),
    ],
    ids=["1-d", "shape", "dimensions"],
)
def test_bad_shapes(src: torch.Tensor, dst: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.copy_blocks(src, dst, [0], [1])


def test_bad_types() -> None:
    with pytest.raises(TypeError, match="dst: expected float32 like src, got int32"):
        ops.copy_blocks(torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.int32), [0], [1])
    with pytest.raises(TypeError, match="src: expected a type of 1, 2, 4 or 8 bytes"):
        ops.copy_blocks(np.zeros((4, 2), complex), np.zeros((4, 2), complex), [0], [1])
    with pytest.raises(ValueError, match="src: expected at most 8 dimensions, got 9"):
        ops.copy_blocks(np.zeros((1,) * 9), np.zeros((1,) * 9), [0], [0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"src": None},
            "src: expected a numpy array or a tensor with DLPack support, got NoneType",
        ),
        ({"src": torch.zeros(4, 2, device="meta")}, "src: this tensor cannot be used by DLPack: "),
        ({"dst": torch.zeros(4, 2).to_sparse()}, "dst: this tensor cannot be used by DLPack: "),
        ({"dst": np.zeros((4, 2), ">f4")}, "dst: this tensor cannot be used by DLPack: "),
        ({"src_blocks": None}, "src_blocks: this tensor cannot be used by DLPack: "),
        ({"dst_blocks": [2**70]}, "dst_blocks: this tensor cannot be used by DLPack: "),
    ],
    ids=["none", "meta", "sparse", "byte-order", "no-blocks", "large-int"],
)
def test_tensors_that_cannot_be_borrowed_are_named(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "src": torch.zeros(4, 2), "dst": torch.zeros(4, 2), "src_blocks": [0], "dst_blocks": [1],
    }  # fmt: skip
    with pytest.raises(TypeError, match=message) as caught:
        ops.copy_blocks(**(arguments | changes))
    assert "\n" not in str(caught.value)


class Producer:
    """A numpy array behind nothing but the DLPack protocol, of the version asked for."""

    def __init__(self, array: np.ndarray[Any, Any], *, versioned: bool, cuda: bool = False) -> None:
        self.array, self.versioned, self.cuda = array, versioned, cuda
        self.stream: int | None = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0) if self.cuda else (1, 0)

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        self.stream = stream
        if options and not self.versioned:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        capsule = self.array.__dlpack__(**options)
        if self.cuda:
            # DLTensor begins with a data pointer; the device type follows it.
            get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
            get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [
                ctypes.py_object, ctypes.c_char_p,
            ]  # fmt: skip
            address = get_pointer(capsule, b"dltensor")
            ctypes.c_int32.from_address(address + 8).value = 2
        return capsule


@pytest.mark.parametrize("versioned", [False, True], ids=["dltensor", "dltensor_versioned"])
def test_both_kinds_of_capsule_are_used_in_place_and_released(versioned: bool) -> None:
    src, dst = np.random.default_rng(0).random((3, 4)), np.zeros((3, 4))
    references = sys.getrefcount(src), sys.getrefcount(dst)
    for _ in range(3):
        ops.copy_blocks(
            Producer(src, versioned=versioned), Producer(dst, versioned=versioned), [2], [0]
        )
        with pytest.raises(ValueError, match="expected a block in"):
            ops.copy_blocks(src, Producer(dst, versioned=versioned), [9], [0])
    assert np.array_equal(dst[0], src[2])
    assert (sys.getrefcount(src), sys.getrefcount(dst)) == references


def test_read_only_arrays_are_read_but_not_written() -> None:
    src = np.random.default_rng(0).random((3, 4))
    src.setflags(write=False)
    dst = np.zeros((3, 4))
    ops.copy_blocks(src, dst, [1], [1])
    assert np.array_equal(dst[1], src[1])
    with pytest.raises(ValueError, match="dst: expected a writable tensor, got a read-only one"):
        ops.copy_blocks(dst, src, [1], [1])


def test_cuda_tensors_say_why_they_cannot_be_used() -> None:
    """With no moves to run, so that a machine that has a device launches nothing."""
    k = Producer(np.zeros((2, 1, 1, 4), np.float32), versioned=False, cuda=True)
    status = ops.cuda_status()
    if status in ("built without CUDA", "no CUDA device"):
        with pytest.raises(RuntimeError, match=status):
            ops.rerope(k, k, [], [], [], np.ones(2, np.float32))
        with pytest.raises(RuntimeError, match=status):
            ops.copy_blocks(k, k, [], [])
    else:
        ops.rerope(k, k, [], [], [], np.ones(2, np.float32))
    assert k.stream == -1  # the producer is told not to synchronise
    with pytest.raises(ValueError, match="dst: expected a tensor on cuda:0 like src, got cpu"):
        ops.copy_blocks(k, np.zeros((2, 1, 1, 4), np.float32), [], [])


def test_importing_the_core_imports_no_torch() -> None:
    code = "import sys, kvspan, kvspan.ops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
