"""The worker's side of Tail-Replay: capture during forward passes, restore before them.

Works on the modules of the running model: vLLM's own layers compute the replay, so that the state
they rebuild has the bits of an ordinary prefill of the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata
from vllm.v1.kv_cache_interface import MambaSpec

from kvspan.vllm.hybrid.store import Page, PageStore, State
from kvspan.vllm.hybrid.tracking import Plan, Work

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

Table = tuple[list[int], ...]
NULL_BLOCK = 0  # vLLM's stand-in for blocks that a request does not need


@dataclass(frozen=True)
class Group:
    """Linear-attention layers in a row. source: the attention layer before them, -1 for none."""

    source: int
    layers: tuple[int, ...]


def find_groups(layer_types: list[str]) -> list[Group]:
    """The groups of a model, in order.

    >>> find_groups(["linear_attention", "full_attention", "linear_attention", "full_attention"])
    [Group(source=-1, layers=(0,)), Group(source=1, layers=(2,))]
    """
    groups: list[Group] = []
    source, layers = -1, []
    for index, kind in enumerate([*layer_types, "full_attention"]):
        if kind != "full_attention":
            layers.append(index)
            continue
        if layers:
            groups.append(Group(source, tuple(layers)))
        source, layers = index, []
    return groups


def when_model_runs(found: Callable[[Any], None]) -> None:
    """Call `found` with the decoder (embed_tokens and layers of known types) before it first runs.

    vLLM gives a connector the attention layers, not the blocks around them.
    """

    def look(module: torch.nn.Module, _args: Any) -> None:
        for candidate in module.modules():
            layers = getattr(candidate, "layers", None)
            if not isinstance(layers, torch.nn.ModuleList) or not hasattr(
                candidate, "embed_tokens"
            ):
                continue
            if all(hasattr(layer, "layer_type") for layer in layers):
                handle.remove()
                found(candidate)
                return

    handle = register_module_forward_pre_hook(look)


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
        self._captured: dict[int, torch.Tensor] = {}
        self._capturing = False
        self._model: Any = None
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="kvspan-copy")
        self.copy_delay = 0.0  # seconds added to every restore's copy, for tests of the overlap
        when_model_runs(self._found)

    # The model.

    def _found(self, model: Any) -> None:
        self._model = model
        kinds = [layer.layer_type for layer in model.layers]
        self.groups = find_groups(kinds)
        self.streams = [group.source for group in self.groups if group.source >= 0]
        self.hidden_size = model.config.hidden_size
        self._linear = {
            index: layer.linear_attn
            for index, layer in enumerate(model.layers)
            if layer.layer_type == "linear_attention"
        }
        for index in self.streams:
            model.layers[index].register_forward_hook(self._keeper(index))

    def _keeper(self, index: int) -> Callable[..., None]:
        def keep(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            if self._capturing:
                hidden, residual = output
                both = torch.cat([hidden, residual], -1) if self.pair else hidden + residual
                self._captured[index] = both

        return keep

    def _slot(self, layer: int, table: Table, position: int) -> int:
        """The block with the layer's state once `position` tokens have been run."""
        gid = self._group_of[self._linear[layer].prefix]
        spec = self.caches.kv_cache_groups[gid].kv_cache_spec
        assert isinstance(spec, MambaSpec)
        column = 0 if spec.mamba_cache_mode == "none" else (position - 1) // spec.block_size
        return table[gid][column]

    # Capture.

    def begin_step(self, capturing: bool) -> None:
        """Before the forward pass: whether it leaves anything behind."""
        self._captured.clear()
        self._capturing = capturing

    @torch.inference_mode()
    def keep(self, works: list[Work], slots: torch.Tensor | None) -> None:
        """After the forward pass: store what it left behind. slots: of its rows, attention's."""
        self._capturing = False
        rows: dict[int, int] = {}
        streams = None
        if any(work.count for work in works):
            if slots is None or len(self._captured) < len(self.streams):
                return  # the pass failed
            rows = {slot: row for row, slot in enumerate(slots.tolist())}
            streams = torch.stack([self._captured[i] for i in self.streams])
        size = self.store.size
        for work in works:
            if work.count:
                assert streams is not None
                first = rows[work.first_block * size + work.start % size]
                done = 0
                for page in work.pages:
                    offset = (work.start + done) % size
                    n = min(size - offset, work.count - done)
                    if self._room(page) and page.filled == offset:
                        assert page.hidden is not None
                        part = streams[:, first + done : first + done + n]
                        page.hidden[:, offset : offset + n].copy_(part)
                        page.filled = offset + n
                    done += n
            for page, block, saved in work.copies:
                if self._room(page):
                    assert page.kv is not None
                    for i, name in enumerate(self._attention_layers):
                        page.kv[i].copy_(self._context[name].kv_cache[block])
                    page.saved = saved
            if work.keep_state is not None:
                self._keep_state(work.track, work.start + work.count, work.keep_state)
        self._captured.clear()

    def _room(self, page: Page) -> bool:
        if page.kv is not None:
            return True
        if page.filled or page.listed:
            return False  # it was dropped while it was being filled
        cache = self._context[self._attention_layers[0]].kv_cache
        width = self.hidden_size * (2 if self.pair else 1)
        return self.store.buffers(
            page,
            torch.Size((len(self._attention_layers), *cache.shape[1:])),
            cache.dtype,
            torch.Size((len(self.streams), self.store.size, width)),
            self.config.model_config.dtype,
        )

    def _keep_state(self, track: Any, position: int, table: Table) -> None:
        tensors = []
        for layer, module in self._linear.items():
            slot = self._slot(layer, table, position)
            conv, recurrent = module.kv_cache
            tensors.append((conv[slot].cpu().clone(), recurrent[slot].cpu().clone()))
        track.new_states.append(State(b"", np.empty(0, np.int64), position, tensors))

    # Restore.

    @torch.inference_mode()
    def restore(self, plan: Plan, track: Any, partial: Page | None) -> None:
        """Bring the plan's KV and states into the request's blocks."""
        if self._model is None:
            raise RuntimeError("kvspan: the model has not run yet")
        began = time.perf_counter()
        copying = self._copier.submit(self._copy_kv, plan)
        try:
            self._restore_states(plan)
            replayed = time.perf_counter()
        finally:
            moved, copy_s = copying.result()
        ended = time.perf_counter()
        timing = self.timing
        timing.restores += 1
        timing.copy_s += copy_s
        timing.replay_s += replayed - began
        timing.wait_s += ended - replayed
        if partial is not None and self._room(partial):
            self._continue_page(plan, partial)
        if plan.exact and plan.length - plan.start >= 64:
            self._keep_state(track, plan.length, self._destination(plan))
        timing.restore_s += time.perf_counter() - began
        plan.audit.bytes = moved + self._state_bytes(plan)
        timing.bytes += plan.audit.bytes

    def _continue_page(self, plan: Plan, partial: Page) -> None:
        offset = plan.length % self.store.size
        donor = plan.pages[-1]
        assert partial.kv is not None and partial.hidden is not None
        assert donor.kv is not None and donor.hidden is not None
        partial.kv.copy_(donor.kv)
        partial.hidden[:, :offset].copy_(donor.hidden[:, :offset])
        partial.filled = partial.saved = offset

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
        blocks = plan.table[self._attention]
        moved = 0
        for index in range(plan.local // self.store.size, len(plan.pages)):
            kv = plan.pages[index].kv
            if kv is None:
                raise RuntimeError("kvspan: a page was dropped while it was wanted")
            for i, name in enumerate(self._attention_layers):
                self._context[name].kv_cache[blocks[index]].copy_(kv[i])
            moved += kv.nbytes
        if self.copy_delay:
            time.sleep(self.copy_delay)
        return moved, time.perf_counter() - began

    def _state_bytes(self, plan: Plan) -> int:
        width = self.hidden_size * (2 if self.pair else 1) * self.config.model_config.dtype.itemsize
        hidden = int((plan.length - plan.start) * width * len(self.streams))
        return hidden + (plan.state.bytes if plan.state is not None else 0)

    def _rows(self, plan: Plan, group: Group, start: int, end: int) -> torch.Tensor:
        """[end - start, width]: what enters a group at these positions."""
        device = next(self._model.parameters()).device
        if group.source < 0:
            return self._model.embed_tokens(torch.from_numpy(plan.token_ids[start:end]).to(device))
        size = self.store.size
        stream = self.streams.index(group.source)
        parts = []
        for index in range(start // size, (end - 1) // size + 1):
            hidden = plan.pages[index].hidden
            if hidden is None:
                raise RuntimeError("kvspan: a page was dropped while it was wanted")
            base = index * size
            parts.append(hidden[stream, max(start - base, 0) : min(end - base, size)])
        return torch.cat(parts).to(device)

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if rows.shape[-1] == self.hidden_size:
            return rows, None
        hidden, residual = rows.chunk(2, -1)
        return hidden.contiguous(), residual.contiguous()

    def _restore_states(self, plan: Plan) -> None:
        table = self._destination(plan)
        order = {layer: i for i, layer in enumerate(self._linear)}
        for group in self.groups:
            for layer in group.layers:
                slot = self._slot(layer, table, plan.length)
                conv, recurrent = self._linear[layer].kv_cache
                if plan.state is not None:
                    kept = plan.state.tensors[order[layer]]
                    conv[slot].copy_(kept[0])
                    recurrent[slot].copy_(kept[1])
                else:
                    conv[slot].zero_()
                    recurrent[slot].zero_()
            if plan.zero or plan.start == plan.length:
                continue
            primed = plan.state is None and plan.start > 0
            if primed:
                self._prime(plan, group, self._slot(group.layers[0], table, plan.length))
            self._replay(plan, group, table)
        self._fill_boundary(plan, table)

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
        mixed = _mixed_qkv(module, x)
        conv = module.kv_cache[0][slot]
        target = conv if conv.shape[-1] == mixed.shape[-1] else conv.transpose(-1, -2)
        target[width - mixed.shape[0] :].copy_(mixed)

    def _replay(self, plan: Plan, group: Group, table: Table) -> None:
        hidden, residual = self._split(self._rows(plan, group, plan.start, plan.length))
        hidden = hidden.clone()
        positions = torch.arange(plan.start, plan.length, device=hidden.device)
        for layer in group.layers:
            block, module = self._model.layers[layer], self._linear[layer]
            metadata = _metadata(len(hidden), self._slot(layer, table, plan.length), hidden.device)
            with set_forward_context(
                {module.prefix: metadata}, self.config, num_tokens=len(hidden)
            ):
                if layer == group.layers[-1]:
                    norm = block.input_layernorm
                    x = norm(hidden) if residual is None else norm(hidden, residual)[0]
                    module(hidden_states=x)
                else:
                    hidden, residual = block(
                        hidden_states=hidden, residual=residual, positions=positions
                    )

    def close(self) -> None:
        self._copier.shutdown()


def _mixed_qkv(module: Any, x: torch.Tensor) -> torch.Tensor:
    """[n, channels]: what a layer's convolution gets for the normed rows x."""
    qkvz, _ = module.in_proj_qkvz(x)
    if module.gqa_interleaved_layout:
        ba, _ = module.in_proj_ba(x)
        q, k, v, *_ = module.fix_query_key_value_ordering(qkvz, ba)
        return torch.cat([t.reshape(len(x), -1) for t in (q, k, v)], -1)
    return qkvz[:, : module.conv_dim // module.tp_size]


def _metadata(n: int, slot: int, device: torch.device) -> GDNAttentionMetadata:
    """For one sequence of n tokens that continues the state in `slot`."""
    starts_cpu = torch.tensor([0, n], dtype=torch.int32)
    starts = starts_cpu.to(device)
    slots = torch.tensor([slot], dtype=torch.int32, device=device)
    common: dict[str, Any] = {
        "num_spec_decodes": 0,
        "num_spec_decode_tokens": 0,
        "num_actual_tokens": n,
        "non_spec_query_start_loc": starts,
        "non_spec_state_indices_tensor": slots,
    }
    if n == 1:  # the chunked kernels want more; one token is what decoding does
        return GDNAttentionMetadata(
            num_prefills=0, num_prefill_tokens=0, num_decodes=1, num_decode_tokens=1, **common
        )
    has_state = torch.ones(1, dtype=torch.bool, device=device)
    nums, batch, offsets = compute_causal_conv1d_metadata(starts_cpu, device=device)
    return GDNAttentionMetadata(
        num_prefills=1,
        num_prefill_tokens=n,
        num_decodes=0,
        num_decode_tokens=0,
        has_initial_state=has_state,
        prefill_query_start_loc=starts,
        prefill_state_indices=slots,
        prefill_has_initial_state=has_state,
        nums_dict=nums,
        batch_ptr=batch,
        token_chunk_offset_ptr=offsets,
        **common,
    )
