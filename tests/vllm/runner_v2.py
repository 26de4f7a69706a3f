"""Model Runner V2 on a CPU. vLLM chooses it on GPUs, where Triton is; on a CPU Triton's own
interpreter runs its kernels. To be imported before vLLM and Triton are."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

from triton import backends


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _Backend:
    """What vLLM looks for; the interpreter needs none."""

    driver = _Driver


backends.backends["cpu"] = _Backend
