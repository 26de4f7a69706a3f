"""The worker's side of Tail-Replay: capture during forward passes, restore before them.

Works on the modules of the running model: vLLM's own layers compute the replay, so that the state
they rebuild has the bits of an ordinary prefill of the same tokens.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from kvspan.hybrid.groups import LINEAR, Group, layer_map
from kvspan.vllm.hybrid.capture import captured, stream
from kvspan.vllm.hybrid.layers import (
    load,
    mixed_qkv,
    to_bytes,
    to_tensor,
)
from kvspan.vllm.hybrid.running import GroupRunner
from kvspan.vllm.hybrid.store import OpenPage, PageStore, page_of
from kvspan.vllm.hybrid.tracking import Plan, Track, Work

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvspan.host import View

Table = tuple[list[int], ...]
WORTH_KEEPING = 64  # tokens: the state after a shorter replay is not kept
NULL_BLOCK = 0  # vLLM's stand-in for blocks that a request does not need


@dataclass
class Timing:
    """Seconds spent since the start, and how often."""

    restores: int = 0
    copy_s: float = 0.0
    replay_s: float = 0.0
    wait_s: float = 0.0
    restore_s: float = 0.0
    bytes: int = 0

    def record(self) -> dict[str, float]:
        return dict(vars(self))


@dataclass
class Replayer:
    """Reads and writes the device's caches for the connector.

    pair: hidden vectors are kept as vLLM hands them on, (hidden, residual), which is exact; else as
        their sum, which takes half the memory.
    """

    config: VllmConfig
    caches: KVCacheConfig
    store: PageStore
    pair: bool = True
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        self._group_of = {
            name: gid
            for gid, group in enumerate(self.caches.kv_cache_groups)
            for name in group.layer_names
        }
        self._attention = next(
            gid
            for gid, group in enumerate(self.caches.kv_cache_groups)
            if not isinstance(group.kv_cache_spec, MambaSpec)
        )
        self._context = self.config.compilation_config.static_forward_context
        self._attention_layers = list(self.caches.kv_cache_groups[self._attention].layer_names)
        self.attention_layer = self._attention_layers[0]
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="kvspan-copy")
        self.copy_delay = 0.0  # seconds added to every restore's copy, for tests of the overlap
        self._model, self.capture = captured(self._context)
        model = self._model
        self._device = next(model.parameters()).device
        layers = layer_map([layer.layer_type for layer in model.layers])
        self.groups, self.streams = layers.groups, layers.streams
        self.hidden_size = model.config.hidden_size
        self._linear = {
            index: layer.linear_attn
            for index, layer in enumerate(model.layers)
            if layer.layer_type == LINEAR
        }
        self._runners = {
            group: GroupRunner(self.config, model, group, self.capture) for group in self.groups
        }
        for runner in self._runners.values():
            runner.warm_up(self.hidden_size * (1 + self.pair), self.config.model_config.dtype)

    def _slot(self, layer: int, table: Table, position: int) -> int:
        """The block with the layer's state once `position` tokens have been run."""
        gid = self._group_of[self._linear[layer].prefix]
        spec = self.caches.kv_cache_groups[gid].kv_cache_spec
        assert isinstance(spec, MambaSpec)
        column = 0 if spec.mamba_cache_mode == "none" else (position - 1) // spec.block_size
        return table[gid][column]

    # Capture.

    @torch.inference_mode()
    def keep(self, works: list[Work], slots: torch.Tensor | None) -> None:
        """After the forward pass: store what it left behind. slots: of its rows, attention's."""
        if sys.exc_info()[0] is not None:
            return  # the pass failed, and what the last one left is still there
        rows: dict[int, int] = {}
        if any(work.count for work in works):
            assert slots is not None
            rows = {slot: row for row, slot in enumerate(slots.tolist())}
        streams = [self.capture.rows(stream(index)) for index in self.streams]
        geometry = self.store.geometry
        size = geometry.size
        for work in works:
            if work.count:
                first = rows[work.first_block * size + work.start % size]
                done = 0
                for page in work.pages:
                    offset = (work.start + done) % size
                    n = min(size - offset, work.count - done)
                    if page.filled == offset:
                        kept = geometry.hidden(self.store.open(page))[:, offset : offset + n]
                        for into, held in zip(kept, streams, strict=True):
                            np.copyto(into, to_bytes(held[first + done : first + done + n]))
                        page.filled = offset + n
                    done += n
            for page, block, saved in work.copies:
                kept = geometry.kv(self.store.open(page))
                for i, name in enumerate(self._attention_layers):
                    np.copyto(kept[i], to_bytes(self._context[name].kv_cache[block]).reshape(-1))
                page.saved = saved
            if work.keep_state is not None:
                end = work.start + work.count
                self._keep_state(work.track, end, work.keep_state, work.saves)

    def _keep_state(self, track: Track, position: int, table: Table, saves: int) -> None:
        parts = []
        for layer, module in self._linear.items():
            slot = self._slot(layer, table, position)
            parts += [to_bytes(part[slot]).reshape(-1).copy() for part in module.kv_cache]
        track.keep_state(position, parts, saves)

    # Restore.

    @torch.inference_mode()
    def restore(self, plan: Plan, track: Track, begun: OpenPage | None) -> None:
        """Bring the plan's KV and states into the request's blocks; both at once.

        begun: the page in which the request goes on.
        """
        began = time.perf_counter()
        copying = self._copier.submit(self._copy_kv, plan)
        try:
            self._restore_states(plan)
            replayed = time.perf_counter()
        finally:
            moved, copy_s = copying.result()
        ended = time.perf_counter()
        if begun is not None:
            self._continue_page(plan, begun)
        if plan.exact and plan.length - plan.start >= WORTH_KEEPING:
            saves = plan.length - plan.start
            self._keep_state(track, plan.length, self._destination(plan), saves)
        plan.audit.bytes = moved + self._state_bytes(plan)
        timing = self.timing  # now: the scheduler takes it away to report it
        timing.restores += 1
        timing.copy_s += copy_s
        timing.replay_s += replayed - began
        timing.wait_s += ended - replayed
        timing.restore_s += time.perf_counter() - began
        timing.bytes += plan.audit.bytes

    def _continue_page(self, plan: Plan, begun: OpenPage) -> None:
        geometry = self.store.geometry
        offset = plan.length % geometry.size
        donor, own = page_of(plan.pages[-1]), self.store.open(begun)
        np.copyto(geometry.kv(own), geometry.kv(donor))
        np.copyto(geometry.hidden(own)[:, :offset], geometry.hidden(donor)[:, :offset])
        begun.filled = begun.saved = offset

    def _destination(self, plan: Plan) -> Table:
        """The request's blocks, such that the state at plan.length goes where the pass looks.

        In mode "align" the step's preparation, which has run by now, has moved on to the block in
        which this step ends.
        """
        table = []
        for gid, blocks in enumerate(plan.table):
            spec = self.caches.kv_cache_groups[gid].kv_cache_spec
            if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "none":
                column = (plan.length + plan.scheduled - 1) // spec.block_size
                blocks = [blocks[column]] * len(blocks)
            table.append(blocks)
        return tuple(table)

    @torch.inference_mode()  # of this thread, not of the one that began the copy
    def _copy_kv(self, plan: Plan) -> tuple[int, float]:
        began = time.perf_counter()
        geometry = self.store.geometry
        blocks = plan.table[self._attention]
        moved = 0
        for index in range(plan.local // geometry.size, len(plan.pages)):
            kv = geometry.kv(page_of(plan.pages[index]))
            for i, name in enumerate(self._attention_layers):
                load(kv[i], self._context[name].kv_cache[blocks[index]])
            moved += kv.nbytes
        if self.copy_delay:
            time.sleep(self.copy_delay)
        return moved, time.perf_counter() - began

    def _state_bytes(self, plan: Plan) -> int:
        geometry = self.store.geometry
        hidden = (plan.length - plan.start) * geometry.row_bytes * geometry.streams
        return hidden + (plan.state.nbytes if plan.state is not None else 0)

    def _rows(self, plan: Plan, group: Group, start: int, end: int) -> torch.Tensor:
        """[end - start, width]: what enters a group at these positions."""
        device = self._device
        if group.source is None:
            ids = torch.from_numpy(plan.token_ids[start:end]).to(device)
            return torch.as_tensor(self._model.embed_tokens(ids))
        geometry = self.store.geometry
        size, stream = geometry.size, self.streams.index(group.source)
        parts = []
        for index in range(start // size, (end - 1) // size + 1):
            hidden = geometry.hidden(page_of(plan.pages[index]))[stream]
            base = index * size
            parts.append(hidden[max(start - base, 0) : min(end - base, size)])
        return to_tensor(np.concatenate(parts), self.config.model_config.dtype).to(device)

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if rows.shape[-1] == self.hidden_size:
            return rows, None
        hidden, residual = rows.chunk(2, -1)
        return hidden.contiguous(), residual.contiguous()

    def _restore_states(self, plan: Plan) -> None:
        table = self._destination(plan)
        kept = self._kept_tensors(plan.state) if plan.state is not None else {}
        for group in self.groups:
            for layer in group.layers:
                slot = self._slot(layer, table, plan.length)
                for i, part in enumerate(self._linear[layer].kv_cache):
                    if kept:
                        part[slot].copy_(kept[layer][i])
                    else:
                        part[slot].zero_()
            if plan.zero or plan.start == plan.length:
                continue
            primed = plan.state is None and plan.start > 0
            if primed:
                self._prime(plan, group, self._slot(group.layers[0], table, plan.length))
            self._replay(plan, group, table)
        self._fill_boundary(plan, table)

    def _kept_tensors(self, state: View) -> dict[int, list[torch.Tensor]]:
        """A kept state's tensors per layer, as `_keep_state` wrote them."""
        held = np.concatenate(state.pages)
        tensors: dict[int, list[torch.Tensor]] = {}
        at = 0
        for layer, module in self._linear.items():
            tensors[layer] = []
            for part in module.kv_cache:
                one = part[0]
                size = one.numel() * one.element_size()
                tensors[layer].append(to_tensor(held[at : at + size], one.dtype).view(one.shape))
                at += size
        return tensors

    def _fill_boundary(self, plan: Plan, table: Table) -> None:
        """Mode "align" also keeps the state of a block that ends right at plan.length."""
        for layer, module in self._linear.items():
            gid = self._group_of[module.prefix]
            spec = self.caches.kv_cache_groups[gid].kv_cache_spec
            assert isinstance(spec, MambaSpec)
            if spec.mamba_cache_mode == "none" or plan.length % spec.block_size:
                continue
            kept = plan.table[gid][plan.length // spec.block_size - 1]
            slot = self._slot(layer, table, plan.length)
            if kept != NULL_BLOCK and kept != slot:
                for part in module.kv_cache:
                    part[kept].copy_(part[slot])

    def _normed(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        hidden, residual = self._split(rows)
        norm = self._model.layers[layer].input_layernorm
        return norm(hidden) if residual is None else norm(hidden, residual)[0]

    def _prime(self, plan: Plan, group: Group, slot: int) -> None:
        """Set the first layer's convolution state from the rows right before the tail."""
        module = self._linear[group.layers[0]]
        width = module.conv_kernel_size - 1
        first = max(plan.start - width, 0)
        x = self._normed(group.layers[0], self._rows(plan, group, first, plan.start))
        mixed = mixed_qkv(module, x)
        conv = module.kv_cache[0][slot]
        target = conv if conv.shape[-1] == mixed.shape[-1] else conv.transpose(-1, -2)
        target[width - mixed.shape[0] :].copy_(mixed)

    def _replay(self, plan: Plan, group: Group, table: Table) -> None:
        runner = self._runners[group]
        slots = [self._slot(layer, table, plan.length) for layer in group.layers]
        for start in range(plan.start, plan.length, runner.most):
            end = min(start + runner.most, plan.length)
            if runner.ids:
                inputs = torch.from_numpy(plan.token_ids[start:end]).to(self._device)
            else:
                inputs = self._rows(plan, group, start, end)
            runner.run(inputs, start, slots)

    def close(self) -> None:
        self._copier.shutdown()
