"""The worker's side of Tail-Replay: capture during forward passes, restore before them.

Works on the modules of the running model: vLLM's own layers compute the replay, so that the state
they rebuild has the bits of an ordinary prefill of the same tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.v1.kv_cache_interface import MambaSpec

from kvspan.host import CopyJob, CopyQueue
from kvspan.host.pages import Bytes
from kvspan.hybrid.groups import LINEAR, Group, layer_map
from kvspan.ops import Stream
from kvspan.vllm.fence import Fence
from kvspan.vllm.hybrid.capture import captured, stream
from kvspan.vllm.hybrid.decay import Bounds
from kvspan.vllm.hybrid.gates import Gates, Part
from kvspan.vllm.hybrid.geometry import Geometry
from kvspan.vllm.hybrid.layers import mixed_qkv
from kvspan.vllm.hybrid.loading import Loading, Pieces, StagedLoading
from kvspan.vllm.hybrid.orders import Restore, StateCopy, Table, Work
from kvspan.vllm.hybrid.raw import in_memory_order
from kvspan.vllm.hybrid.reads import Reads
from kvspan.vllm.hybrid.recurrent import RecurrentStates
from kvspan.vllm.hybrid.running import GroupRunner
from kvspan.vllm.hybrid.saving import Places, Rows, Saving, StagedSaving

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvspan.host.pages import Spans


@dataclass
class Timing:
    """Of restores since it was last taken: how many, and seconds."""

    restores: int = 0
    copy_s: float = 0.0  # until it was seen to be done, after the step's replays
    replay_s: float = 0.0
    wait_s: float = 0.0


@dataclass
class Replayer:
    """Reads and writes the device's caches for the connector.

    memory: the host tier's, once it is known. geometry: of the pages there. rank: of this worker
        among those that share the heads; hidden vectors, the same on all, are written by the first.
    pair: hidden vectors are kept as vLLM hands them on, (hidden, residual), which is exact; else as
        their sum, which takes half the memory.
    """

    config: VllmConfig
    caches: KVCacheConfig
    geometry: Geometry
    pair: bool = True
    rank: int = 0
    memory: Bytes | None = None
    timing: Timing = field(default_factory=Timing)

    # Whether what is kept is staged on the device. None: where that is a GPU.
    STAGED: ClassVar[bool | None] = None

    def __post_init__(self) -> None:
        self._attention = next(
            gid
            for gid, group in enumerate(self.caches.kv_cache_groups)
            if not isinstance(group.kv_cache_spec, MambaSpec)
        )
        self._context = self.config.compilation_config.static_forward_context
        self._attention_layers = list(self.caches.kv_cache_groups[self._attention].layer_names)
        self.attention_layer = self._attention_layers[0]
        self._model, self.capture = captured(self._context)
        model = self._model
        self.device = next(model.parameters()).device
        self.queue = CopyQueue(str(self.device))
        layers = layer_map([layer.layer_type for layer in model.layers])
        self.groups, self.streams = layers.groups, layers.streams
        self.hidden_size = model.config.hidden_size
        linear = {
            index: layer.linear_attn
            for index, layer in enumerate(model.layers)
            if layer.layer_type == LINEAR
        }
        self.states = RecurrentStates(linear, self.caches)
        self._runners = {
            group: GroupRunner(self.config, model, group, self.capture) for group in self.groups
        }
        for runner in self._runners.values():
            runner.warm_up(self.hidden_size * (1 + self.pair), self.config.model_config.dtype)
        self._gates = Gates(self.capture, linear) if self.geometry.cells else None
        self._reads = self._make_reads()
        self.saving = self._make_saving()
        self.loading = self._make_loading()
        self._fence = Fence(self.device)
        self._after: Stream | None = None  # what came before the restores of a step
        self._copying: list[tuple[CopyJob, float]] = []  # their KV, and since when

    def _make_saving(self) -> Saving:
        places = Places(self.geometry, self.rank, self._page, self._reads.own)
        if not self._is_staged():
            return Saving(places)
        modules = self.states.modules.values()
        parts = [part[0].nbytes for module in modules for part in module.kv_cache]
        least = max(self.geometry.block_bytes, self.geometry.row_bytes, *parts)
        staging = self.capture.staging
        if staging is None or len(staging) < least:
            staging = torch.empty(least, dtype=torch.uint8, device=self.device)
        return StagedSaving(places, staging, CopyQueue(str(self.device)))

    def _make_reads(self) -> Reads:
        edge = max(module.conv_kernel_size for module in self.states.modules.values()) - 1
        most = {group: runner.most for group, runner in self._runners.items()}
        return Reads(
            self.geometry, self.rank, self.groups, self.streams, most, edge, self._page, self._at
        )

    def _is_staged(self) -> bool:
        return self.device.type != "cpu" if self.STAGED is None else self.STAGED

    def _make_loading(self) -> Loading:
        if not self._is_staged():
            return Loading()
        ring, least = self.capture.ring, 2 * self._reads.largest
        if ring is None or len(ring) < least:
            ring = torch.empty(least, dtype=torch.uint8, device=self.device)
        return StagedLoading(ring)

    # Capture.

    @torch.inference_mode()
    def keep(self, works: list[Work], rows: Rows | None) -> None:
        """Write what a pass, or a request at its end, leaves. rows: of the pass."""
        filling = [work for work in works if work.fills]
        if filling and rows is not None:
            if self._gates:
                self._keep_gates(list(zip(rows.firsts(filling), filling, strict=True)))
            if self.rank == 0:
                streams = [self.capture.rows(stream(i)) for i in self.streams]
                self.saving.rows(streams, rows, filling)
        copies = [copy for work in works for copy in work.copies]
        if copies:
            self.saving.blocks(self._pools(), copies)
        for work in works:
            if work.state is not None:
                self.keep_state(work.state)

    def _pools(self) -> list[torch.Tensor]:
        """Of the attention layers."""
        return [self._context[name].kv_cache for name in self._attention_layers]

    def _keep_gates(self, works: list[tuple[int, Work]]) -> None:
        """Sum up what gates did to the tokens of a pass. works: with their first rows."""
        cells = self.geometry.cells
        if self._gates is None or cells is None:
            return
        parts = []
        for row, work in works:
            held = [self.geometry.gates(self._page(fill.page)) for fill in work.fills]
            fills = zip(held, work.fills, strict=True)
            parts.append(Part(row, [(page, fill.first, fill.count) for page, fill in fills]))
        self._gates.write(parts, cells, self.rank)
        for part, (_, work) in zip(parts, works, strict=True):
            if work.seen is not None:
                position, table = work.seen
                norms = self._gates.norms(self.states.slots(table, position)).cpu().numpy()
                for page, _, _ in part.pages:
                    np.copyto(cells.norms(page, self.rank), norms)

    def _page(self, at: int) -> Bytes:
        assert self.memory is not None
        return self.memory[at : at + self.geometry.page_bytes]

    def keep_state(self, copy: StateCopy) -> None:
        self.saving.state(copy.spans, self.states.tensors(copy.table, copy.position))

    def _at(self, spans: Spans) -> Pieces:
        assert self.memory is not None
        return [self.memory[at : at + count] for at, count in spans]

    # Restore.

    @torch.inference_mode()
    def restore(self, plan: Restore) -> None:
        """Bring a plan's states into the request's blocks, while its KV is copied to others: that
        is there after `join`, which is called once for all restores of a step."""
        began = time.perf_counter()
        if self._after is None:
            self._after = self._fence.behind()
            self.loading.start(self._after)
        self.loading.begin(self.queue, self._reads.of(plan))
        try:
            copying = self._copy_kv(plan, self._after)
            if copying is not None:
                self._copying.append((copying, began))
            self._restore_states(plan)
        except BaseException:
            self._give_up()
            raise
        finally:
            self.loading.end()
        self.timing.restores += 1
        self.timing.replay_s += time.perf_counter() - began
        if plan.begun is not None:
            self._continue_page(plan, plan.begun)
        if plan.keep is not None:
            self.keep_state(StateCopy(plan.length, self.states.destination(plan), plan.keep))
        for number, spans in plan.keep_parts.items():
            layers = self.groups[number].layers
            table = self.states.destination(plan)
            self.saving.state(spans, self.states.tensors(table, plan.length, layers))

    def join(self) -> None:
        """The pass may read the KV of all restores since the last call."""
        replayed = time.perf_counter()
        try:
            for job, began in self._copying:
                if not job.wait_on_stream(self._fence.current()):
                    raise RuntimeError("the copy of a restore's KV was cancelled")
                self.saving.wait_for(job)
                self.timing.copy_s += time.perf_counter() - began
        except BaseException:
            self._give_up()
            raise
        self.timing.wait_s += time.perf_counter() - replayed
        self._copying, self._after = [], None

    def _give_up(self) -> None:
        """The memory of what is copied is not these restores' any more."""
        for job, _ in self._copying:
            job.cancel()
        self._copying, self._after = [], None

    def take_timing(self) -> Timing:
        taken, self.timing = self.timing, Timing()
        return taken

    def _continue_page(self, plan: Restore, begun: int) -> None:
        geometry = self.geometry
        offset = plan.length % geometry.size
        donor, own = self._page(plan.pages[-1]), self._page(begun)
        np.copyto(geometry.kv(own, self.rank), geometry.kv(donor, self.rank))
        if self.rank == 0:
            np.copyto(geometry.hidden(own)[:, :offset], geometry.hidden(donor)[:, :offset])
        if geometry.cells is not None:
            gates = geometry.gates(own)
            np.copyto(
                geometry.cells.part(gates, self.rank),
                geometry.cells.part(geometry.gates(donor), self.rank),
            )
            geometry.cells.cut(gates, offset, self.rank)

    def _copy_kv(self, plan: Restore, after: Stream) -> CopyJob | None:
        """Begin to copy all KV that the device does not have, one submission for all layers.

        after: a stream with the work of those whose blocks they were.
        """
        first = plan.local // self.geometry.size
        if first == len(plan.pages):
            return None
        pages = [self.geometry.kv(self._page(at), self.rank) for at in plan.pages[first:]]
        blocks = plan.table[self._attention][first : len(plan.pages)]
        pools = [in_memory_order(pool) for pool in self._pools()]
        size = pools[0][0].nbytes
        return self.queue.submit(
            [page[i][:size] for i in range(len(pools)) for page in pages],
            [(pool, blocks) for pool in pools],
            after=after,
        )

    def _rows(self, plan: Restore, group: Group, start: int, end: int) -> torch.Tensor:
        """[end - start, width]: what enters a group at these positions."""
        if group.source is None:
            ids = torch.from_numpy(plan.token_ids[start:end]).to(self.device)
            return torch.as_tensor(self._model.embed_tokens(ids))
        held = self.loading.read(self._reads.rows(plan, group, start, end), private=True)
        return held.view(self.config.model_config.dtype).view(end - start, -1)

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if rows.shape[-1] == self.hidden_size:
            return rows, None
        hidden, residual = rows.chunk(2, -1)
        return hidden.contiguous(), residual.contiguous()

    def _restore_states(self, plan: Restore) -> None:
        table = self.states.destination(plan)
        for number in range(len(self.groups)):
            start, state = self._reads.begins(plan, number)
            self._restore_group(plan, number, start, state, table)
            if plan.bounds is not None:
                self._keep_bound(plan, number, plan.bounds, table)
        if self._gates is not None:
            self._gates.saw(self.states.slots(table, plan.length))
        self.states.fill_boundary(plan, table)

    def _keep_bound(self, plan: Restore, number: int, bounds: Bounds, table: Table) -> None:
        """Replay a group exactly where its state is so small that the bound does not hold."""
        group, part = self.groups[number], bounds.groups[number]
        if not part.bound or self._gates is None:
            return
        slots = self.states.slots(table, plan.length, group.layers)
        squares = self._gates.norms(slots).square().sum(1)
        if self.geometry.ranks > 1:  # what one replays, all must
            squares = tensor_model_parallel_all_reduce(squares)
        if not bounds.hold(number, squares.sqrt().tolist()):
            kept = self._reads.kept(plan, number)
            self._restore_group(plan, number, bounds.exact.start, kept, table)

    def _restore_group(self, plan: Restore, number: int, start: int, state: Pieces | None,
                       table: Table) -> None:  # fmt: skip
        """state: what is kept of it at `start`, as `Saving.state` left it; None: zero."""
        group, at = self.groups[number], 0
        held = None if state is None else self.loading.read(state)
        for into in self.states.tensors(table, plan.length, group.layers):
            if held is None:
                into.zero_()
                continue
            count = into.numel() * into.element_size()
            into.copy_(held[at : at + count].view(into.dtype).view(into.shape))
            at += count
        if plan.zero or start == plan.length:
            return
        if state is None and start > 0:
            self._prime(plan, group, start, self.states.slot(group.layers[0], table, plan.length))
        self._replay(plan, group, start, table)

    def _normed(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        hidden, residual = self._split(rows)
        norm = self._model.layers[layer].input_layernorm
        return norm(hidden) if residual is None else norm(hidden, residual)[0]

    def _prime(self, plan: Restore, group: Group, start: int, slot: int) -> None:
        """Set the first layer's convolution state from the rows right before the tail."""
        module = self.states.modules[group.layers[0]]
        width = module.conv_kernel_size - 1
        rows = self._rows(plan, group, self._reads.before(start), start)
        x = self._normed(group.layers[0], rows)
        mixed = mixed_qkv(module, x)
        conv = module.kv_cache[0][slot]
        target = conv if conv.shape[-1] == mixed.shape[-1] else conv.transpose(-1, -2)
        target[width - mixed.shape[0] :].copy_(mixed)

    def _replay(self, plan: Restore, group: Group, begin: int, table: Table) -> None:
        runner = self._runners[group]
        slots = list(self.states.slots(table, plan.length, group.layers).values())
        for start, end in self._reads.runs(group, begin, plan.length):
            if runner.ids:
                inputs = torch.from_numpy(plan.token_ids[start:end]).to(self.device)
            else:
                inputs = self._rows(plan, group, start, end)
            runner.run(inputs, start, slots)

    def close(self) -> None:
        self.queue.close()
        self.saving.close()
