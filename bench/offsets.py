"""Whether a kernel's pointer offsets can wrap, read from its Triton IR.

An index fits 32 bits; its product with a stride need not. One product makes an index (`program * BLOCK`, `batch * heads + head`), so an
offset counts as narrow where it went through a second one in 32 bits, or through one with a stride, which is an argument of that name.
A quotient or a remainder is an index again, and what was loaded is taken to be one.
"""

import re

_ASSIGNMENT = re.compile(r"^\s*(%[\w$.-]+)(?::\d+)? = \"?([\w.]+)\"?(.*)$")
_VALUE = re.compile(r"%[\w$.-]+")
_PAIR = re.compile(r"(%[\w$.-]+) = (%[\w$.-]+)")
_STRIDE = re.compile(r"(%\w*stride[\w$.]*):")
_NARROW = re.compile(r"(?:x|\s)i(?:8|16|32)>?\s*$")
_INDICES = {"arith.divsi", "arith.divui", "arith.remsi", "arith.remui", "arith.cmpi", "tt.load"}


def narrow_offsets(ttir: str) -> list[str]:
    """The names of the pointers in `ttir` whose offset may have wrapped in 32 bits."""
    carried: dict[str, int] = {}
    _walk(ttir, carried)  # learns what loops carry from one step to the next
    return _walk(ttir, carried)


def _walk(ttir: str, carried: dict[str, int]) -> list[str]:
    products = dict.fromkeys(_STRIDE.findall(ttir), 1)  # how often a value was multiplied in 32 bits
    regions: list[list[str]] = []  # what the next `scf.yield` gives its values to
    narrow = []
    for line in ttir.splitlines():
        line = line.split(" loc(")[0]
        if line.lstrip().startswith("scf.yield") and regions:
            given = [products.get(value, 0) for value in _VALUE.findall(line)]
            for name in regions.pop():
                carried[name] = max([carried.get(name, 0), *given])
            continue
        if not (found := _ASSIGNMENT.match(line)):
            continue
        name, operation, rest = found.groups()
        values = _VALUE.findall(rest)
        most = max((products.get(value, 0) for value in values), default=0)
        if operation in ("scf.for", "scf.if", "scf.while"):
            pairs = _PAIR.findall(rest)
            for argument, initial in pairs:  # the first pair of a `for` is its variable and where that starts
                products[argument] = max(products.get(initial, 0), carried.get(argument, 0))
            products[name] = max(most, carried.get(name, 0))
            # The values that a region takes and gives are not told apart: where one is narrow, all are.
            regions += [[name, *(argument for argument, _ in pairs[operation == "scf.for" :])]] * (2 if operation == "scf.if" else 1)
        elif operation == "arith.muli" and _NARROW.search(rest):
            products[name] = most + 1
        elif operation not in _INDICES:
            products[name] = most
        if operation == "tt.addptr" and products.get(values[1], 0) >= 2:
            narrow.append(name)
    return narrow
