"""The process: its socket, its signals, and how it comes to an end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from kvspan.errors import UsageError
from kvspan.serve.app import make_app
from kvspan.serve.service import Service

# After the last request is over: for connections to be closed.
CLOSE_TIMEOUT_S = 5
Say = Callable[[str], None]


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen yet, so that a port in use is found out early."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """SIGTERM or SIGINT: let running requests finish, refuse new ones. Again: stop at once."""

    def __init__(
        self, config: uvicorn.Config, service: Service, ready: Callable[[], None], say: Say
    ) -> None:
        super().__init__(config)
        self.service = service
        self.ready = ready
        self.say = say
        self.give_up = asyncio.Event()
        self.stopping: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # In a signal handler: nothing but waking up the loop is safe.
        self.loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self.stopping is not None:
            self.give_up.set()
            return
        self.stopping = self.loop.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            running = self.service.running
            if running:
                self.say(f"stopping: {running} requests are being answered, new ones are refused")
            if cut := await self.service.drain(self.give_up):
                self.say(f"{cut} requests were cut short")
        finally:
            self.should_exit = True


def serve(service: Service, listener: socket.socket, ready: Callable[[], None], say: Say) -> None:
    """Serve until a signal ends it. ready: called once requests are accepted."""
    config = uvicorn.Config(
        make_app(service),
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
    )

    async def main() -> None:
        await _Server(config, service, ready, say).serve(sockets=[listener])

    asyncio.run(main())
