"""Ranks that watch each other: one that dies or gives up is known to all, and none waits for it.

Rank 0 listens, every other rank holds a connection to it. A process that dies closes its connections, whatever it was
waiting for; one that gives up says why first. Neither is a collective, so a rank that hangs in one hears of it too.
A rank that has waited for the others says where: one that is in a later collective already will never come there.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed import Store

from stepgraph.comm.errors import CommError

_KEY = "stepgraph/watch"
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))  # a host that is gone: 9 s
_CONNECT_S = 60.0
_TELL_S = 1.0  # a rank that waits says so this often


def end_process(message: str) -> None:
    """End this process at once: its main thread may hang in a collective, on the device or off it."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(1)


class Watch:
    """One rank's eye on the others, in a thread.

    store: where rank 0 leaves its port. host: where the others reach it. grace: seconds that the main thread has to
    notice a failure by itself, and to end in order, before `end` is called with what happened.

    All ranks meet and run collectives in the same order. collectives: that this one has begun; counted by whoever runs
    them, each rank alike.

    Raises:
        CommError: rank 0 cannot be reached.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        store: Store,
        host: str,
        *,
        grace: float = 5.0,
        end: Callable[[str], None] = end_process,
    ) -> None:
        self.failure: str | None = None
        self.collectives = 0
        self._meetings = 0
        self._waits: tuple[int, str, int] | None = None  # in which meeting, what for, behind how many collectives
        self._rank, self._grace, self._end = rank, grace, end
        self._closed, self._failed = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # of sending, and of the failure
        self._peers: dict[socket.socket, int] = _listen(store, world) if rank == 0 else _connect(store, host, rank)
        self._unread = dict.fromkeys(self._peers, b"")
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="stepgraph-watch", daemon=True)
        self._thread.start()

    def raise_if_failed(self) -> None:
        """Raises CommError: a rank has died or given up; says which and why."""
        if self.failure is not None:
            raise CommError(self.failure)

    def failure_soon(self, seconds: float = 1.0) -> str | None:
        """The failure that an error of a collective comes from; it may be a moment behind."""
        self._failed.wait(seconds)
        return self.failure

    def fail(self, why: str) -> None:
        """Tell all ranks that this one gives up. They have `grace` seconds to end."""
        self._note(f"rank {self._rank} failed: {why}", tell=True)

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Around a meeting of all ranks. doing: what for."""
        self._meetings += 1
        self._waits = (self._meetings, doing, self.collectives)
        try:
            yield
        finally:
            self._waits = None

    def close(self) -> None:
        """Leave in order: the others do not take it for a death."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._send({"bye": self._rank})
        self._wake.close()
        self._thread.join(timeout=5.0)
        for peer in list(self._peers):
            peer.close()
        self._woken.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for one in self._peers:
                selector.register(one, selectors.EVENT_READ)
            while not self._closed.is_set():
                ready = selector.select(_TELL_S)
                waits = self._waits
                if not ready and waits is not None:
                    self._send({"waits": [self._rank, *waits]})
                for key, _ in ready:
                    peer = key.fileobj
                    if not isinstance(peer, socket.socket) or peer is self._woken:
                        return
                    if not self._read(peer):
                        selector.unregister(peer)
                        with self._lock:
                            del self._peers[peer]
                        peer.close()

    def _read(self, peer: socket.socket) -> bool:
        """Take in what a peer says; whether there may be more."""
        rank = self._peers[peer]
        try:
            received = peer.recv(65536)
        except OSError:
            received = b""
        if not received:
            self._note(f"rank {rank} died", tell=True)
            return False
        *lines, self._unread[peer] = (self._unread[peer] + received).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "bye" in said:
                return False
            if "waits" in said:
                if self._rank == 0:
                    self._send(said)
                self._compare(*said["waits"])
            else:
                self._note(said["failure"], tell=self._rank == 0)
        return True

    def _compare(self, rank: int, meeting: int, doing: str, collectives: int) -> None:
        """Whether this rank, which may be about to come, is already behind what it would have to come before."""
        mine = self.collectives  # before the meetings: both only grow, and a collective may follow a meeting
        if self._meetings < meeting and mine > collectives:
            self._note(
                f"ranks do different things: rank {rank} is {doing}; rank {self._rank} is in a step that rank {rank} "
                f"does not run; all must make the same calls in the same order",
                tell=True,
            )

    def _note(self, failure: str, *, tell: bool) -> None:
        """Keep the first failure; what follows from it would only hide it."""
        with self._lock:
            if self.failure is not None or self._closed.is_set():
                return
            self.failure = failure
        self._failed.set()
        if tell:
            self._send({"failure": failure})
        threading.Thread(target=self._wait_for_end, name="stepgraph-end", daemon=True).start()

    def _wait_for_end(self) -> None:
        if not self._closed.wait(self._grace) and self.failure is not None:
            self._end(self.failure)

    def _send(self, said: dict[str, object]) -> None:
        line = json.dumps(said).encode() + b"\n"
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            with contextlib.suppress(OSError):  # it is gone, which its closed connection tells
                peer.sendall(line)


def _listen(store: Store, world: int) -> dict[socket.socket, int]:
    with socket.create_server(("", 0)) as server:
        server.settimeout(_CONNECT_S)
        store.set(_KEY, str(server.getsockname()[1]))
        peers: dict[socket.socket, int] = {}
        while len(peers) < world - 1:
            try:
                peer, _ = server.accept()
            except TimeoutError:
                there = {0, *peers.values()}
                absent = ", ".join(str(rank) for rank in range(world) if rank not in there)
                raise CommError(f"ranks {absent} of {world} have not come within {_CONNECT_S:.0f} s") from None
            peer.settimeout(_CONNECT_S)
            rank = int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "big")
            peers[_kept_alive(peer)] = rank
    return peers


def _connect(store: Store, host: str, rank: int) -> dict[socket.socket, int]:
    try:
        port = int(store.get(_KEY).decode())
        peer = socket.create_connection((host, port), timeout=_CONNECT_S)
        peer.sendall(rank.to_bytes(4, "big"))
    except (OSError, RuntimeError) as error:
        raise CommError(f"rank {rank} cannot reach rank 0 at {host}: {error}") from None
    return {_kept_alive(peer): 0}


def _kept_alive(peer: socket.socket) -> socket.socket:
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        peer.setsockopt(socket.IPPROTO_TCP, option, value)
    return peer
