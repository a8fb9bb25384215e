"""Read the disassembly of a CUDA kernel: its loops, and what a warp executes in one pass."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

Trips: TypeAlias = int | Callable[[Counter[str]], int]

_LABEL = re.compile(r"^([.$\w]+):")
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*?)\s*;")
_TARGET = re.compile(r"`\((\S+)\)")

_DIVISION = re.compile(r"(?:div|rem)_[us]64")
_CLASSES = {  # instructions by the part of their name before the first dot
    "FMA": "FFMA FADD FMUL",
    "IMAD": "IMAD",
    "ALU": "IADD3 LOP3 SHF LEA ISETP SEL PRMT VIADD IABS IMNMX VIMNMX VIADDMNMX POPC FLO MOV "
    "FMNMX FSETP FSEL FSET FCHK PLOP3 P2R R2P",
    "MMA": "HMMA IMMA",
    "MUFU": "MUFU I2F F2I F2F I2FP F2FP FRND",
    "SHFL": "SHFL",
    "BAR": "BAR",
    "F64": "DADD DMUL DFMA DSETP DMNMX",
    "LOCAL": "LDL STL",
}
_CLASS_OF = {name: key for key, names in _CLASSES.items() for name in names.split()}
_MEMORY = ("LDG", "LDGSTS", "LDS", "STG", "STS")
_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}
_WIDE_LOADS = ("LDG.128", "LDGSTS.128")

_PROCESSORS = 4  # of a multiprocessor, each with registers and warps of its own
_REGISTERS = 16384  # of a processor
_REGISTER_UNIT = 256  # in which a warp gets them
_SHARED_BYTES = 228 * 1024
_SHARED_RESERVED = 1024  # of a block
_MAX_WARPS = 64
_MAX_BLOCKS = 32
_WARP = 32


class Instruction(NamedTuple):
    """One line of the disassembly."""

    address: int
    predicate: str  # such as "!P0"; "" without one
    opcode: str  # such as "LDG.E.128"
    operands: str

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]

    @property
    def target(self) -> str | None:
        """The label that a branch or a call goes to."""
        found = _TARGET.search(self.operands)
        return found[1] if found else None

    @property
    def kind(self) -> str:
        """What `count` counts it as; memory instructions have their width in bits.

        What never executes, such as the reads of shared memory that the assembler puts before
        asynchronous copies, is issued and no more.
        """
        if self.predicate == "!PT":
            return "OTHER"
        if self.name in _MEMORY:
            bits = (_BITS[part] for part in self.opcode.split(".") if part in _BITS)
            return f"{self.name}.{next(bits, 32)}"
        if self.name == "CALL":
            return "DIV64" if _DIVISION.search(self.operands) else "CALL"
        return _CLASS_OF.get(self.name, "OTHER")


class Program(NamedTuple):
    """A kernel's instructions, and where its labels are among them."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


class Loop(NamedTuple):
    """The instructions `begin` to `end`, of which the last branches to the first."""

    begin: int
    end: int

    def holds(self, other: Loop) -> bool:
        """Tell whether another loop lies inside this one."""
        return other != self and self.begin <= other.begin and other.end <= self.end


def parse(sass: str) -> Program:
    r"""Read what ``nvdisasm -c`` wrote.

    Examples
    --------
    >>> program = parse(".L_x_0:\n /*0000*/ @!P0 BRA `(.L_x_0) ;")
    >>> program.instructions[0].target, program.labels
    ('.L_x_0', {'.L_x_0': 0})
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _LINE.search(line):
            address, predicate, opcode, operands = found.groups()
            instructions.append(Instruction(int(address, 16), predicate or "", opcode, operands))
    return Program(tuple(instructions), labels)


def find_loops(program: Program) -> list[Loop]:
    """List the loops, in the order of their last instructions; inner ones before outer ones.

    What a warp comes to only by ``BRA.DIV``, for threads that have diverged, stands behind the
    kernel and branches back into it; that is no loop.
    """
    reached = _reached(program)
    loops: dict[int, Loop] = {}  # by first instruction: of `continue`s, the last one counts
    for i in sorted(reached):
        if (to := _branch(program, i)) is not None and to <= i:
            loops[to] = Loop(to, i + 1)
    return sorted(loops.values(), key=lambda loop: (loop.end, -loop.begin))


def _branch(program: Program, i: int) -> int | None:
    """Return where an instruction branches to."""
    instruction = program.instructions[i]
    if instruction.name != "BRA" or ".DIV" in instruction.opcode or instruction.target is None:
        return None
    return program.labels.get(instruction.target)


def _reached(program: Program) -> set[int]:
    """Return the instructions that can be reached from the first."""
    reached: set[int] = set()
    ahead = [0]
    while ahead:
        i = ahead.pop()
        if i in reached or i >= len(program.instructions):
            continue
        reached.add(i)
        instruction, to = program.instructions[i], _branch(program, i)
        always = not instruction.predicate and instruction.operands.startswith("`")
        if instruction.name not in ("EXIT", "RET") or instruction.predicate:
            if not (to is not None and always):
                ahead.append(i + 1)
            if to is not None:
                ahead.append(to)
    return reached


def innermost(loops: list[Loop]) -> list[Loop]:
    """Return the loops that hold no other."""
    return [loop for loop in loops if not any(loop.holds(other) for other in loops)]


def outer_loop(program: Program, loop: Loop) -> Loop | None:
    """Return the loop just around another, or None."""
    around = [other for other in find_loops(program) if other.holds(loop)]
    return min(around, key=lambda other: other.end - other.begin, default=None)


def main_loop(program: Program) -> Loop | None:
    """Return the loop over the tiles of K and V, or None in a kernel without loops.

    The innermost loop that loads 16 bytes at a time and multiplies; where several do, the one with
    most loads. Without one, it is the innermost loop that is longest.
    """
    loops = find_loops(program)
    content = {loop: _kinds(program, loop) for loop in loops}

    def loads(loop: Loop) -> int:
        return sum(content[loop][kind] for kind in _WIDE_LOADS)

    working = [x for x in loops if loads(x) and (content[x]["FMA"] or content[x]["MMA"])]
    if working:
        return max(innermost(working), key=loads)
    return max(innermost(loops), key=lambda loop: loop.end - loop.begin, default=None)


def _kinds(program: Program, loop: Loop) -> Counter[str]:
    return Counter(x.kind for x in program.instructions[loop.begin : loop.end])


def count(program: Program, loop: Loop | None = None, trips: Trips = 1) -> Counter[str]:
    """Count what a warp executes in one pass, by kind.

    Both sides of a branch count, so this is an upper bound.

    Parameters
    ----------
    program : Program
    loop : Loop or None
        What to count in; None is all that can be reached from the kernel's first instruction.
    trips : int or callable
        Passes of a loop inside, for one of the loop around it; by the kinds of its instructions,
        where it's a function. 0 suits loops that were unrolled and take few passes: the compiler
        has these before the loop.

    Returns
    -------
    Counter
        FMA (float32 arithmetic), IMAD, ALU (other integer arithmetic, comparisons, selections),
        MMA, MUFU (and conversions), SHFL, BAR, F64, DIV64 (calls of a 64-bit division), LOCAL
        (loads and stores of a thread's stack), OTHER; LDG, LDGSTS, LDS, STG and STS with their
        bits, such as "LDG.128".
    """
    whole = loop or Loop(0, len(program.instructions))
    inside = [
        (one, trips(_kinds(program, one)) if callable(trips) else trips)
        for one in find_loops(program)
        if whole.holds(one)
    ]
    counts: Counter[str] = Counter()
    for i in _reached(program):
        if whole.begin <= i < whole.end:
            around = (passes for one, passes in inside if one.begin <= i < one.end)
            counts[program.instructions[i].kind] += math.prod(around)
    return +counts


def occupancy(registers: int, shared_bytes: int, threads: int) -> int:
    """Return how many blocks are on a multiprocessor of compute capability 9.0 at a time.

    Parameters
    ----------
    registers : int
        Of a thread.
    shared_bytes, threads : int
        Of a block.

    Examples
    --------
    >>> occupancy(96, 11392, 128), occupancy(32, 48 * 1024, 128), occupancy(16, 0, 32)
    (5, 4, 32)
    """
    warps = -(-threads // _WARP)
    units = -(-max(registers, 1) * _WARP // _REGISTER_UNIT)
    by_registers = _PROCESSORS * (_REGISTERS // (units * _REGISTER_UNIT)) // warps
    by_shared = _SHARED_BYTES // (shared_bytes + _SHARED_RESERVED)
    return min(by_registers, by_shared, _MAX_WARPS // warps, _MAX_BLOCKS)
