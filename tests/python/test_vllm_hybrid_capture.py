"""Capture of hidden vectors, eager and compiled, on a model of the shape of vLLM's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from kvspan.vllm.hybrid.capture import Capture, capture_streams, captured, stream

WIDTH, ROOM = 16, 12


class Layer(nn.Module):
    """(hidden, residual) in and out, the residual a sum that is rounded to bfloat16."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer_type = kind
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).to(torch.bfloat16) / 4)
        if kind == "linear_attention":
            self.linear_attn = SimpleNamespace()

    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x = residual.float() + hidden.float()
        scale = x.square().mean(-1, keepdim=True).rsqrt()
        return (x * scale).to(hidden.dtype) @ self.weight, x.to(hidden.dtype)


class OneVector(Layer):
    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return hidden + hidden @ self.weight


class Decoder(nn.Module):
    def __init__(self, kind: type[Layer] = Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        names = ["linear_attention", "full_attention"] * 2
        self.layers = nn.ModuleList(kind(name) for name in names)

    def forward(self, x: Tensor) -> Tensor:
        hidden, residual = x, torch.ones_like(x)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return hidden


def make(pair: bool = True) -> tuple[Decoder, Capture]:
    decoder = Decoder()
    capture = capture_streams(decoder, WIDTH, torch.bfloat16, pair=pair, capacity=ROOM)
    capture.rows(stream(1)).zero_()
    return decoder, capture


def tokens(n: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, WIDTH, generator=generator).to(torch.bfloat16)


def stream_of(decoder: Decoder, x: Tensor) -> tuple[Tensor, Tensor]:
    """What leaves the second layer, which is the only stream of such a model."""
    hidden, residual = x, torch.ones_like(x)
    for layer in decoder.layers[:2]:
        hidden, residual = layer.forward(hidden, residual)
    return hidden, residual


@torch.inference_mode()
@pytest.mark.parametrize("pair", [True, False], ids=["pair", "sum"])
def test_rows_are_the_streams(pair: bool) -> None:
    decoder, capture = make(pair)
    x = tokens(5)
    decoder(x)
    hidden, residual = stream_of(decoder, x)
    expected = torch.cat([hidden, residual], 1) if pair else hidden + residual
    assert torch.equal(capture.rows(stream(1))[:5], expected)
    assert capture.nbytes == ROOM * WIDTH * (1 + pair) * 2


@torch.inference_mode()
def test_layers_with_one_vector() -> None:
    decoder = Decoder(OneVector)
    capture = capture_streams(decoder, WIDTH, torch.bfloat16, pair=True, capacity=ROOM)
    x = tokens(5)
    given = decoder.layers[1](x)
    assert torch.equal(capture.rows(stream(1))[:5], given)


@torch.inference_mode()
def test_padding_beyond_the_room_is_dropped() -> None:
    decoder, capture = make()
    decoder(tokens(ROOM + 3))
    hidden, residual = stream_of(decoder, tokens(ROOM + 3)[:ROOM])
    torch.testing.assert_close(capture.rows(stream(1)), torch.cat([hidden, residual], 1))


@torch.inference_mode()
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_graph_breaks(backend: str) -> None:
    """One graph for all lengths; the rows stay where they are and are those of the last pass."""
    decoder, capture = make()
    rows = capture.rows(stream(1))
    place = rows.data_ptr()
    compiled = torch.compile(decoder, backend=backend, fullgraph=True, dynamic=True)
    for n in (7, 3, ROOM):
        before = rows.clone()
        x = tokens(n, seed=n)
        given = compiled(x)
        torch.testing.assert_close(given, decoder.forward(x), rtol=0.05, atol=0.05)
        compiled(x)
        hidden, residual = stream_of(decoder, x)
        torch.testing.assert_close(rows[:n], torch.cat([hidden, residual], 1), rtol=0.05, atol=0.05)
        assert torch.equal(rows[n:], before[n:])
    assert capture.rows(stream(1)).data_ptr() == place


@torch.inference_mode()
def test_compiled_code_goes_on_with_what_was_captured() -> None:
    """The layers behind a stream, compiled by themselves, give the bits of the whole model.

    Without the operation's claim to write its inputs the compiler adds the residual up anew, in
    float32, and the rest starts from other numbers than those that were kept.
    """
    decoder, capture = make()
    whole = torch.compile(decoder, fullgraph=True, dynamic=True)
    given = whole(tokens(9))
    rows = capture.rows(stream(1))[:9].clone()

    def rest(hidden: Tensor, residual: Tensor) -> Tensor:
        for layer in decoder.layers[2:]:
            hidden, residual = layer(hidden, residual)
        return hidden

    hidden, residual = (part.contiguous() for part in rows.chunk(2, 1))
    with capture.off():
        again = torch.compile(rest, fullgraph=True, dynamic=True)(hidden, residual)
    assert torch.equal(again, given)
    assert torch.equal(capture.rows(stream(1))[:9], rows)


@torch.inference_mode()
def test_off_leaves_nothing_behind() -> None:
    decoder, capture = make()
    capture.rows(stream(1)).fill_(3.0)
    with capture.off():
        decoder(tokens(5))
        torch.compile(decoder, backend="aot_eager", fullgraph=True)(tokens(5))
    assert (capture.rows(stream(1)) == 3.0).all()
    decoder(tokens(5))
    assert not (capture.rows(stream(1))[:5] == 3.0).all()


def test_schema() -> None:
    rows, parts = torch.zeros(4, 6), [torch.randn(3, 2), torch.randn(3, 4)]
    torch.library.opcheck(torch.ops.kvspan.capture.default, (rows, parts))


@torch.inference_mode()
def test_further_rows() -> None:
    _, capture = make()
    gates = nn.Linear(WIDTH, 3, dtype=torch.bfloat16)
    capture.tap("gates", gates, 3, torch.float32, lambda output: [output.float().exp()])
    x = tokens(4)
    expected = gates(x).float().exp()
    assert torch.equal(capture.rows("gates")[:4], expected)
    assert capture.rows("gates").dtype == torch.float32


def test_the_decoder_is_found_by_its_layers() -> None:
    decoder, capture = make()
    other, _ = make()
    layers = {"model.layers.2.linear_attn": decoder.layers[2].linear_attn, "another": object()}
    assert captured(layers) == (decoder, capture)
    with pytest.raises(RuntimeError, match="built without the buffers"):
        captured({"another": object()})
    assert captured({"x": other.layers[0].linear_attn})[0] is other


def test_room_for_copies_is_made_with_the_model() -> None:
    """Where copies are staged, for vLLM to count it: of a step's rows, and of two streams."""
    assert make()[1].staging is None and make()[1].ring is None
    decoder = Decoder().to("meta")
    capture = capture_streams(decoder, WIDTH, torch.bfloat16, pair=True, capacity=1 << 20)
    assert capture.staging is not None and capture.ring is not None
    assert capture.largest == capture.rows(stream(1)).nbytes == (1 << 20) * 2 * WIDTH * 2
    assert len(capture.staging) == capture.nbytes and len(capture.ring) == 2 * capture.largest
    assert capture.ring.is_meta
