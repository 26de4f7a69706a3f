"""`kvspan serve --engine vllm` as a process of its own, on a tiny model with a tokenizer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from serving import TEMPLATE, Reply, ServerProcess
from tiny_models import configs, word_tokenizer
from transformers import AutoModelForCausalLM

BLOCK = 32
START_S = 180


def save_chat_model(folder: Path) -> Path:
    """A model whose heads vLLM's CPU attention takes, with a chat template."""
    config = configs()["llama"]
    config.head_dim = 32
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    word_tokenizer(TEMPLATE).save_pretrained(folder)
    return folder


class VllmProcess(ServerProcess):
    """Its requests are those of `serving.ServerProcess`. flags: vLLM's. env: added to ours."""

    def __init__(self, model: Path, *flags: str, parentheses: str = "", **env: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.host, self.url = "127.0.0.1", f"http://127.0.0.1:{self.port}"
        words = ["serve", "--engine", "vllm"]
        if parentheses:
            words += ["--parentheses", parentheses]
        words += [str(model), "--served-model-name", "tiny", "other"]
        words += ["--host", self.host, "--port", str(self.port), "--dtype", "float32"]
        words += ["--max-model-len", "4096", "--max-num-batched-tokens", "2048"]
        words += ["--max-num-seqs", "16", "--enforce-eager", *flags]
        variables: dict[str, Any] = {**os.environ, **env, "VLLM_LOGGING_LEVEL": "INFO"}
        # The engine gets a process of its own, as it does wherever nobody asks otherwise.
        variables.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        self.log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  as long as the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvspan", *words],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            text=True,
            env=variables,
        )

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return super().post(path, body, **{"content-type": "application/json", **headers})

    def __enter__(self) -> VllmProcess:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self.get("/health").status == 200:
                    return self
            except OSError:
                time.sleep(0.2)
        self.__exit__()
        raise AssertionError(f"the server did not start:\n{self.said()[-4000:]}")

    def __exit__(self, *exc: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def said(self) -> str:
        """All of its output so far."""
        self.log.flush()
        self.log.seek(0)
        return self.log.read()
