"""What macOS's own tools say of memory, swap, power and heat, read from their output."""

from __future__ import annotations

import re

# Pages that a program can have without anything being written to disk.
_AVAILABLE = ("free", "inactive", "speculative")


def available_bytes(vm_stat: str) -> int | None:
    """Memory that is to be had, of `vm_stat`; None where that says nothing."""
    page = re.search(r"page size of (\d+) bytes", vm_stat)
    counts = dict(re.findall(r"^Pages (\w+):\s+(\d+)", vm_stat, re.MULTILINE))
    if page is None or not counts:
        return None
    return int(page[1]) * sum(int(counts.get(name, 0)) for name in _AVAILABLE)


def swap_bytes(swapusage: str) -> int:
    """Swap in use, of `sysctl -n vm.swapusage`."""
    found = re.search(r"used = ([\d.,]+)([MG])", swapusage)
    if found is None:
        return 0
    return int(float(found[1].replace(",", ".")) * (1 << (20 if found[2] == "M" else 30)))


def is_low_power(pmset: str) -> bool:
    """Whether `pmset -g` says that power is saved."""
    return bool(re.search(r"^\s*lowpowermode\s+1\b", pmset, re.MULTILINE))


def speed_limit(therm: str) -> int:
    """Per cent of its speed that the processor may run at, of `pmset -g therm`."""
    found = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", therm)
    return int(found[1]) if found else 100
