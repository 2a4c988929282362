"""What an optimised program says of itself in its text: bytes by collective, and the TPU compiler's cycle estimates.

In: the HLO text of a compiled program (``compiled.as_text()``), which is one device's part of it. Out: totals of one
execution. What lies in a loop counts as often as the loop's trip count says: one that the compiler knows, or the one
constant of a condition that counts from zero, as those of ``jax.lax.scan`` do.
"""

import math
import re
from collections.abc import Iterator

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "f8e4m3fn": 8, "f8e5m2": 8, "bf16": 16, "f16": 16, "c64": 64, "c128": 128}

_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{")
_COLLECTIVE = re.compile(rf" = (?P<shape>.*?) (?P<kind>{'|'.join(COLLECTIVES)})(?P<start>-start)?\(")
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_LIMIT = re.compile(r" = s32\[\]\S* constant\((\d+)\)")
_OPERANDS = re.compile(r"%([\w.\-]+)")
# A fusion's computation is part of its instruction; the others are sequences of instructions of their own.
_SEQUENCES = re.compile(r"\b(?:to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_FUSED = re.compile(r"\bcalls=%?([\w.\-]+)")


def collective_bytes(text: str) -> dict[str, int]:
    """Bytes that each kind of collective works on, on one device: those of the whole array it reduces or gathers."""
    totals: dict[str, int] = {}
    for line, times, _ in _executed(text):
        if found := _COLLECTIVE.search(line):
            sizes = _sizes(found["shape"])
            if found["start"] and found["kind"] in ("all-gather", "all-to-all", "collective-permute"):
                # The pair of operands and results; a permutation's has two counters besides.
                sizes = [size for size in sizes if size > 4] if found["kind"] == "collective-permute" else sizes
                sizes = sizes[len(sizes) // 2 :]
            if found["kind"] == "reduce-scatter":
                operands = _OPERANDS.findall(line[found.end() :].partition(")")[0])
                sizes = [size for name in operands for size in _sizes(_shape_of(text, name))]
            totals[found["kind"]] = totals.get(found["kind"], 0) + times * sum(sizes)
    return totals


def estimated_cycles(text: str) -> int:
    """The sum of the TPU compiler's estimates over all instructions that carry one; 0 where none does, as on CPUs."""
    return sum(
        times * int(cycles)
        for line, times, fused in _executed(text)
        if not fused
        for cycles in _CYCLES.findall(line)[:1]
    )


def _sizes(shape: str) -> list[int]:
    """Bytes of each array in "f32[2,3]{1,0:T(8,128)}" or in a tuple of such."""
    return [_bytes(*found) for found in _SHAPE.findall(re.sub(r"\{[^}]*\}", "", shape))]


def _bytes(dtype: str, dimensions: str) -> int:
    bits = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype) or 0)
    return bits * math.prod(int(size) for size in dimensions.split(",") if size) // 8


def _shape_of(text: str, name: str) -> str:
    found = re.search(rf"^\s*(?:ROOT )?%{re.escape(name)} = (\(.*?\) |\S+ )", text, re.MULTILINE)
    return found[1] if found else ""


def _computations(text: str) -> tuple[dict[str, list[str]], str | None]:
    """Lines by computation, and the name of the entry."""
    computations: dict[str, list[str]] = {}
    entry, lines = None, None
    for line in text.splitlines():
        if lines is None and (found := _HEADER.match(line)):
            lines = computations[found["name"]] = []
            entry = found["name"] if found["entry"] else entry
        elif line.startswith("}"):
            lines = None
        elif lines is not None:
            lines.append(line)
    return computations, entry


def _executed(text: str) -> Iterator[tuple[str, int, bool]]:
    """Every instruction with how often it runs, and whether it is a part of a fusion."""
    computations, entry = _computations(text)
    waiting = [(entry, 1, False)] if entry else []
    while waiting:
        name, times, fused = waiting.pop()
        for line in computations.get(name, ()):
            yield line, times, fused
            inner = times * (_trips(line, computations) if " while(" in line else 1)
            called = _SEQUENCES.findall(line)
            called += [branch.strip(" %") for found in _BRANCHES.findall(line) for branch in found.split(",")]
            waiting += [(other, inner, fused) for other in called]
            waiting += [(other, inner, True) for other in _FUSED.findall(line)]


def _trips(line: str, computations: dict[str, list[str]]) -> int:
    """How often a loop runs; 1 where its instruction and its condition do not say."""
    if known := _TRIPS.search(line):
        return int(known[1])
    condition = computations.get(_CONDITION.search(line)[1], ())
    limits = [int(found[1]) for inner in condition if (found := _LIMIT.search(inner))]
    return limits[0] if len(limits) == 1 and any("direction=LT" in inner for inner in condition) else 1
