"""The forward pass of a hybrid model over runs of tokens of one sequence.

An exact run works in pieces: PIECE rows on an absolute grid (tokens 0-255, 256-511, ...), rows that
are not asked for filled with zeros. Every product then has the same shape whatever the prompt's
length and wherever it was split, and the gated delta rule's chunks of CHUNK tokens lie on the
same grid, so that the bits of a token's vectors, of its KV and of the states depend on the tokens
up to it alone. What is approximate anyway runs in rows of its own size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvspan import ops
from kvspan.engine.attention import Row, Slots, attending
from kvspan.engine.loading import quiet
from kvspan.engine.runner import CHECK_TOKENS, CHECK_TOP, KVCache, ModelRunner
from kvspan.hybrid.attention import PieceAttention, StepAttention
from kvspan.hybrid.families import Family, family_of
from kvspan.hybrid.hidden import HiddenCache
from kvspan.hybrid.pieces import PIECE
from kvspan.hybrid.pieces import Rows as Rows
from kvspan.hybrid.state import RecurrentState


class HybridRunner(ModelRunner):
    """Runs a hybrid model. Its state is the KV pool's, the hidden vectors' and the decays'.

    decays: float32 [num_blocks, linear layers, Hv], sum of the log decays of a block's tokens;
    a block's row is 0 before its tokens are written.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, hidden: HiddenCache) -> None:
        super().__init__(model, cache)
        self.family: Family = family_of(model)
        self.map = self.family.map
        self.hidden = hidden
        self.full_number = {layer: i for i, layer in enumerate(self.map.full)}
        self.linear_number = {layer: i for i, layer in enumerate(self.map.linear)}
        self.stream_number = {layer: i for i, layer in enumerate(self.map.streams)}
        shape = (cache.num_blocks, len(self.map.linear), self.family.sizes.num_v_heads)
        self.decays = torch.zeros(shape, device=model.device)
        self._mask = torch.empty(0)

    def new_state(self) -> RecurrentState:
        return RecurrentState.zeros(
            len(self.map.linear), self.family.sizes, self.model.dtype, self.model.device
        )

    def _how(self) -> dict[str, Any]:
        """Options of kvspan's operations: threads if torch may use them, torch's stream."""
        stream = 0
        if self.model.device.type == "cuda":
            stream = torch.cuda.current_stream(self.model.device).cuda_stream
        return {"num_threads": 1 if torch.get_num_threads() == 1 else 0, "stream": stream}

    @property
    def bytes_per_token(self) -> int:
        """KV and hidden vectors of one token."""
        cache, hidden = self.cache, self.hidden
        vectors = sum(
            table.shape[1] * table.itemsize for table in (*hidden.vectors, *hidden.scales)
        )
        return int(cache.bytes_per_block(cache.specs, 1, self.model.dtype) + vectors)

    def mask(self, rows: Rows) -> Tensor:
        """What is added to scores [size, base + size]: 0 for tokens up to one's own, else -inf."""
        end = rows.base + rows.size
        if self._mask.shape[0] == rows.size and self._mask.shape[1] >= end:
            return self._mask[:, self._mask.shape[1] - end :]
        past = rows.base * 3 // 2 if rows.size == PIECE else rows.base
        mask = torch.zeros(
            rows.size, past + rows.size, dtype=self.model.dtype, device=self.model.device
        )
        mask[:, past:] = torch.full_like(mask[:, past:], -torch.inf).triu(1)
        if rows.size == PIECE:
            self._mask = mask
        return mask[:, past + rows.size - end :]

    @torch.inference_mode()
    def run(
        self,
        rows: Rows,
        tokens: Tensor,
        slots: Slots,
        state: RecurrentState,
        *,
        write_from: int = 0,
        want_logits: bool = False,
    ) -> Tensor | None:
        """All layers over tokens [lo, hi) of a sequence, from and to its state, in place.

        tokens: int64, the whole sequence's. slots: where they lie in the pool; KV, hidden vectors
        and decays of tokens from write_from on are written there. state.position must be rows.lo.
        Logits [vocab_size] of the last token, float32, or None.
        """
        family = self.family
        x = rows.spread(family.embed(tokens[rows.lo : rows.hi]))
        end = rows.base + rows.size
        rope = family.rotary(x, torch.arange(rows.base, end, device=x.device))
        first = max(rows.lo, write_from)
        kept = slots.ids[first : rows.hi]
        new = slice(first - rows.base, rows.hi - rows.base)
        with attending(PieceAttention(self, rows, slots, write_from)):
            for layer, kind in enumerate(family.config.layer_types):
                if kind == "full_attention":
                    residual, branch = family.full(layer, x, rope)
                    if layer in self.stream_number and len(kept):
                        stream = self.stream_number[layer]
                        self.hidden.write(stream, kept, residual[new], branch[new])
                    x = residual + branch
                else:
                    x, g = self.linear(layer, rows, x, state)
                    self._add_decays(layer, kept, g[new])
        state.position = rows.hi
        return family.logits(x[rows.real][-1:])[0] if want_logits else None

    def _add_decays(self, layer: int, slots: Tensor, g: Tensor) -> None:
        blocks = slots // self.cache.block_size
        self.decays[:, self.linear_number[layer]].index_add_(0, blocks, g)

    def linear(
        self, layer: int, rows: Rows, x: Tensor, state: RecurrentState
    ) -> tuple[Tensor, Tensor]:
        """One linear-attention layer with its FFN: (output [size, H], log decays [size, Hv])."""
        x, g = self.mixer(layer, rows, x, state)
        return self.family.feed_forward(layer, x), g

    def mixer(
        self, layer: int, rows: Rows, x: Tensor, state: RecurrentState
    ) -> tuple[Tensor, Tensor]:
        """`linear` without the FFN."""
        family, number = self.family, self.linear_number[layer]
        projected = family.project(layer, x)
        q, k, v = self._convolve(layer, rows, projected.mixed, state)
        g, beta = self._gates(layer, rows, projected.a, projected.b)
        part = rows.chunks
        out = torch.zeros_like(v)
        out[part], final = ops.gated_delta(
            q[part],
            k[part],
            v[part],
            g[part],
            beta[part],
            initial_state=state.ssm[number][None],
            **self._how(),
        )
        state.ssm[number] = final[0]
        assert projected.z is not None
        return family.mix(layer, x, out, projected.z), g

    def state_only(self, layer: int, rows: Rows, x: Tensor, state: RecurrentState) -> None:
        """What `mixer` does to the state, of the same bits, and nothing else."""
        number = self.linear_number[layer]
        projected = self.family.project(layer, x, outputs=False)
        _, k, v = self._convolve(layer, rows, projected.mixed, state)
        g, beta = self._gates(layer, rows, projected.a, projected.b)
        part = rows.chunks
        final = ops.gated_delta_state(
            k[part],
            v[part],
            g[part],
            beta[part],
            initial_state=state.ssm[number][None],
            **self._how(),
        )
        state.ssm[number] = final[0]

    def tail_state_only(self, layer: int, rows: Rows, x: Tensor, state: RecurrentState) -> None:
        """`state_only` for a run that is approximate: q is not even projected, but for the
        convolution's own state. Not of the same bits."""
        family, s, number = self.family, self.family.sizes, self.linear_number[layer]
        kv, a, b = family.project_kv(layer, x)
        g, beta = family.gates(layer, a, b)
        weight, bias = family.conv(layer)
        conv = state.conv[number]
        recent = family.project(layer, x[-(s.width - 1) :], outputs=False).mixed.T
        state.conv[number] = torch.cat((conv, recent), 1)[:, -(s.width - 1) :].contiguous()
        out, _ = ops.causal_conv1d(
            kv,
            weight[s.key_dim :],
            None if bias is None else bias[s.key_dim :],
            state=conv[s.key_dim :][None].contiguous(),
            **self._how(),
        )
        k, v = out.split([s.key_dim, s.value_dim], dim=-1)
        final = ops.gated_delta_state(
            k.unflatten(-1, (s.num_k_heads, s.head_k_dim)),
            v.unflatten(-1, (s.num_v_heads, s.head_v_dim)),
            g,
            beta,
            initial_state=state.ssm[number][None],
            **self._how(),
        )
        state.ssm[number] = final[0]

    def _convolve(
        self, layer: int, rows: Rows, mixed: Tensor, state: RecurrentState
    ) -> tuple[Tensor, Tensor, Tensor]:
        """mixed [size, C] through the convolution -> q, k [size, Hk, dk], v [size, Hv, dv]."""
        s, number = self.family.sizes, self.linear_number[layer]
        before = s.width - 1
        lo, hi = rows.lo - rows.base, rows.hi - rows.base
        padded = mixed.new_zeros(before + rows.size, s.channels)
        padded[lo : lo + before] = state.conv[number].T
        padded[lo + before : hi + before] = mixed[lo:hi]
        weight, bias = self.family.conv(layer)
        start = padded[:before].T[None].contiguous()
        out, _ = ops.causal_conv1d(padded[before:], weight, bias, state=start, **self._how())
        state.conv[number] = padded[hi : hi + before].T.contiguous()
        q, k, v = out.split([s.key_dim, s.key_dim, s.value_dim], dim=-1)
        return (
            q.unflatten(-1, (s.num_k_heads, s.head_k_dim)),
            k.unflatten(-1, (s.num_k_heads, s.head_k_dim)),
            v.unflatten(-1, (s.num_v_heads, s.head_v_dim)),
        )

    def _gates(self, layer: int, rows: Rows, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """(g, beta) [size, Hv]; 0 outside the real rows, where the state then stays as it is."""
        g, beta = self.family.gates(layer, a, b)
        if rows.hi - rows.lo < rows.size:
            g, beta = rows.spread(g[rows.real]), rows.spread(beta[rows.real])
        return g, beta

    @torch.inference_mode()
    def decode(self, steps: Sequence[tuple[int, int, Slots, RecurrentState]]) -> Tensor:
        """One token more for each sequence: (token, position, slots, state) each.

        Writes as `run` does. Logits [len(steps), vocab_size], float32.
        """
        family, device = self.family, self.model.device
        tokens = torch.tensor([step[0] for step in steps], device=device)
        positions = torch.tensor([step[1] for step in steps], device=device)
        rows = [
            Row(tokens[i : i + 1], position, slots)
            for i, (_, position, slots, _) in enumerate(steps)
        ]
        kept = torch.cat([slots.ids[at : at + 1] for _, at, slots, _ in steps])
        x = family.embed(tokens)
        rope = family.rotary(x, positions)
        with attending(StepAttention(self, rows)):
            for layer, kind in enumerate(family.config.layer_types):
                if kind == "full_attention":
                    residual, branch = family.full(layer, x, rope)
                    if layer in self.stream_number:
                        self.hidden.write(self.stream_number[layer], kept, residual, branch)
                    x = residual + branch
                else:
                    x = self._decode_linear(layer, x, [step[3] for step in steps], kept)
        for _, position, _, state in steps:
            state.position = position + 1
        return family.logits(x)

    def _decode_linear(
        self, layer: int, x: Tensor, states: Sequence[RecurrentState], slots: Tensor
    ) -> Tensor:
        family, s, number = self.family, self.family.sizes, self.linear_number[layer]
        projected = family.project(layer, x)
        g, beta = family.gates(layer, projected.a, projected.b)
        weight, bias = family.conv(layer)
        outs = []
        for i, state in enumerate(states):
            row = slice(i, i + 1)
            mixed, conv = ops.causal_conv1d(
                projected.mixed[row],
                weight,
                bias,
                state=state.conv[number][None],
                **self._how(),
            )
            q, k, v = mixed.split([s.key_dim, s.key_dim, s.value_dim], dim=-1)
            out, final = ops.gated_delta(
                q.unflatten(-1, (s.num_k_heads, s.head_k_dim)),
                k.unflatten(-1, (s.num_k_heads, s.head_k_dim)),
                v.unflatten(-1, (s.num_v_heads, s.head_v_dim)),
                g[row],
                beta[row],
                initial_state=state.ssm[number][None],
                **self._how(),
            )
            outs.append(out)
            state.conv[number], state.ssm[number] = conv[0], final[0]
        self._add_decays(layer, slots, g)
        assert projected.z is not None
        return family.feed_forward(layer, family.mix(layer, x, torch.cat(outs), projected.z))

    def forward(self, rows: Sequence[Row]) -> Tensor:
        raise AssertionError("a hybrid model's rows need their states: use run or decode")

    @torch.inference_mode()
    def check_against_transformers(self) -> float:
        """As `ModelRunner.check_against_transformers`, over a prompt and two decoded tokens."""
        device = self.model.device
        vocab = self.model.get_input_embeddings().num_embeddings
        count = min(CHECK_TOKENS, self.cache.num_blocks * self.cache.block_size)
        ids = torch.arange(1, count + 1, device=device) * 7919 % vocab
        slots, state, split = Slots(torch.arange(count, device=device)), self.new_state(), count - 2
        ours = [self.run(Rows.piece(0, split), ids, slots, state, want_logits=True)]
        for at in range(split, count):
            ours.append(self.decode([(int(ids[at]), at, slots, state)])[0])
        self.decays.zero_()
        theirs = self._transformers_logits(ids)[split - 1 :]
        worst = 0.0
        for mine, expected in zip(ours, theirs.log_softmax(-1), strict=True):
            assert mine is not None
            top = expected.topk(min(CHECK_TOP, vocab)).indices
            worst = max(worst, float((mine.log_softmax(-1) - expected)[top].abs().max()))
        return worst

    def _transformers_logits(self, ids: Tensor) -> Any:
        implementation = self.model.config._attn_implementation
        try:
            self.model.set_attn_implementation("eager")
            with quiet():  # of the kernels that it would rather have
                return self.model(input_ids=ids[None], use_cache=False).logits[0].float()
        finally:
            self.model.set_attn_implementation(implementation)
