"""The process that grader processes are forked from: it has the libraries loaded, serves nothing and has no threads.

    python -m services.reward.template FD TIMEOUT_S LOADER [--network]

Every message on the socket FD carries the socket of a worker to fork. The worker says hello on it with its pidfd and
whether it is cut off from the network, and then answers questions (services/reward/worker.py). The template ends when
FD is closed or its parent dies, and its workers end with it.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
from collections.abc import Sequence

from services.common.parent_death import set_parent_death_signal
from services.reward import sandbox
from services.reward.worker import Loader, load, warm_up, work

CUT_OFF, CONNECTED = b"c", b"n"
"""The hello of a worker without network, and of one with."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Fork until the socket closes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fd", type=int, help="socket to the parent")
    parser.add_argument("timeout_s", type=float, help="deadline of a question")
    parser.add_argument("loader", help="module:function, see worker.load")
    parser.add_argument("--network", action="store_true", help="set workers no limits, and leave them the network")
    args = parser.parse_args(arguments)
    hello = CONNECTED if args.network or not sandbox.leave_network() else CUT_OFF
    set_parent_death_signal(signal.SIGKILL)  # after the namespace, which clears it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which ends its workers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the workers
    loader = load(args.loader)
    warm_up()
    gc.collect()
    gc.freeze()  # workers share these objects: no collection need touch them
    with socket.socket(fileno=args.fd) as control:
        while sock := _next_socket(control):
            if _fork() == 0:
                control.close()
                _begin(sock, hello, args, loader)
            sock.close()


def _fork() -> int:
    """As os.fork; -1 if the system has no room for another process, which the parent hears of by the closed socket."""
    try:
        return os.fork()
    except OSError:
        return -1


def _next_socket(control: socket.socket) -> socket.socket | None:
    message, fds, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=fds[0]) if message and fds else None


def _begin(sock: socket.socket, hello: bytes, args: argparse.Namespace, loader: Loader) -> None:
    """The life of a worker; does not return."""
    try:
        set_parent_death_signal(signal.SIGKILL)
        os.setsid()  # a process group of its own
        sock.set_inheritable(False)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pidfd = os.pidfd_open(os.getpid())
        socket.send_fds(sock, [hello], [pidfd])
        os.close(pidfd)
        sandbox.dump_no_core()
        if not args.network:
            sandbox.limit_to_computing()
        work(sock, 0 if args.network else args.timeout_s, loader)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
