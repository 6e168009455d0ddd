"""Serve the store that the agents of torchrun meet at, on a host that runs no ranks.

Where it ends, jobs end; so it should be on a host that stays. One serves any number of jobs::

    python examples/rendezvous_store.py 10.0.0.254 29400
"""

import sys
import threading

from torch.distributed import TCPStore


def main() -> None:
    """Serve at the address and port of the command line until killed."""
    address, port = sys.argv[1], int(sys.argv[2])
    store = TCPStore(address, port, is_master=True, wait_for_workers=False)
    print(f"serving at {address}:{store.port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
