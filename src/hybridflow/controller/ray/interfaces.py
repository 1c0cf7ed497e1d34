"""The network interface of a node's address, for libraries that would otherwise follow the host name."""

import psutil


def own_interface(address: str) -> str:
    """Return the name of this machine's network interface that has the address; "" if none has it."""
    addresses = psutil.net_if_addrs()
    return next((name for name, found in addresses.items() if address in {entry.address for entry in found}), "")
