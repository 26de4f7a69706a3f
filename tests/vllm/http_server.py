"""`kvspan serve --engine vllm` as a process of its own, on a tiny model with a tokenizer."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from serving import TEMPLATE, Reply, ServerProcess
from tiny_models import VOCAB, configs, word_tokenizer

BLOCK = 32
START_S = 300
KEY = "a-key"
SPARE = 5  # ids that the model has and the tokenizer has not, from VOCAB on


def save_chat_model(folder: Path) -> Path:
    """A model whose heads vLLM's CPU attention takes, with a chat template."""
    config = configs()["llama"]
    config.head_dim = 32
    config.vocab_size = VOCAB + SPARE
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] = 0.0  # never generated: there is no text for them
    model.save_pretrained(folder)
    word_tokenizer(TEMPLATE).save_pretrained(folder)
    return folder


class VllmProcess(ServerProcess):
    """Its requests are those of `serving.ServerProcess`. flags: vLLM's. env: added to ours.

    parentheses, host_gib: options of kvspan's.
    """

    def __init__(
        self, model: Path, *flags: str, parentheses: str = "", host_gib: str = "", **env: str
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.host, self.url = "127.0.0.1", f"http://127.0.0.1:{self.port}"
        words = ["serve", "--engine", "vllm"]
        if parentheses:
            words += ["--parentheses", parentheses]
        if host_gib:
            words += ["--host-gib", host_gib]
        words += [str(model), "--served-model-name", "tiny", "other"]
        words += ["--host", self.host, "--port", str(self.port), "--dtype", "float32"]
        words += ["--max-model-len", "4096", "--max-num-batched-tokens", "2048"]
        words += ["--max-num-seqs", "16", "--enforce-eager", *flags]
        variables = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO", "KVSPAN_API_KEY": KEY, **env}
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

    def _ask(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> Reply:
        usual = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        return super()._ask(method, path, data, {**usual, **headers})

    def stream(self, path: str, body: Any) -> tuple[http.client.HTTPConnection, Any]:
        connection = self.connection()
        usual = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        connection.request("POST", path, json.dumps(body), usual)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        return connection, response

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

    def vllm_metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's values that carry these labels among others."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        total = 0.0
        for line in self.get("/metrics").data.decode().splitlines():
            found = re.fullmatch(r"([^{ ]+)(?:\{(.*)\})? (\S+)", line)
            if found and found[1] == name and wanted <= set((found[2] or "").split(",")):
                total += float(found[3])
        return total

    def until_idle(self) -> None:
        """Wait until vLLM runs nothing; fails after half a minute."""
        deadline = time.monotonic() + 30
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        while any(self.vllm_metric(name) for name in names):
            assert time.monotonic() < deadline, "requests are left over"
            time.sleep(0.05)
