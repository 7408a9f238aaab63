"""The scalar instructions of a dumped schedule, as far as they decide what issues.

The counters of loops and the predicates of branches are computed on the scalar unit, by
few kinds of instruction, and every value has a name of its own.
"""

import operator
import re

_COMMENT = re.compile(r"/\*.*?\*/")
# The operation, the predicate under which it is done, what holds otherwise, and the
# operands.
_INSTRUCTION = re.compile(r"([\w.]+) (?:\((!?)%(\w+)(?:, %(\w+))?\),? ?)?(.*)")
_LOAD = re.compile(r"sld \[smem:\[#(\w+_spill)\]\]")

_OPERATIONS = {
    "smov": lambda a: a,
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "smulhi": lambda a, b: a * b >> 32,
    "smin": min,
    "smax": max,
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda a, b: a << b % 32,
    "sshrl": lambda a, b: a % 2**32 >> b % 32,
    "sshra": lambda a, b: a >> b % 32,
    "pmov": lambda a: a,
    "pneg": lambda a: not a,
    "pand": lambda a, b: a and b,
    "por": lambda a, b: a or b,
    "pnand": lambda a, b: not (a and b),
    "pnor": lambda a, b: not (a or b),
    "scalar_select": lambda predicate, a, b: a if predicate else b,
    "scmp.eq": operator.eq,
    "scmp.ne": operator.ne,
    "scmp.lt": operator.lt,
    "scmp.le": operator.le,
    "scmp.gt": operator.gt,
    "scmp.ge": operator.ge,
}
_UNSIGNED = ("smulhi", "smin", "smax", "scmp.lt", "scmp.le", "scmp.gt", "scmp.ge")


class Scalars:
    """The scalar values of one kernel, by name."""

    def __init__(self, text: str):
        self._text = text
        self._definitions: dict[str, str] = {}
        self._slots: dict[str, str | None] = {}

    def definition(self, name: str) -> str:
        """The instruction that defines `name`, without comments, or ""."""
        if name not in self._definitions:
            start = f"%{name} = "
            at = self._text.find(start)
            rest = self._text[at + len(start) : at + len(start) + 300]
            rest = rest.partition(";;")[0].partition("\n")[0]
            instruction = _COMMENT.sub("", rest).partition("/*")[0].strip(" }")
            self._definitions[name] = instruction if at >= 0 else ""
        return self._definitions[name]

    def value(self, name: str, known: dict[str, int | None]) -> int | None:
        """What `name` is, or None where that does not follow.

        Args:
          known: values by name, those of the counters of loops among them. What is
            found is added.
        """
        if name not in known:
            known[name] = None  # for what depends on itself
            try:
                known[name] = self._evaluate(self.definition(name), known)
            except RecursionError:  # too long a chain counts as not known
                pass
        return known[name]

    def _evaluate(self, instruction, known):
        if load := _LOAD.fullmatch(instruction):
            stored = self._stored(load[1])
            return self.value(stored, known) if stored else None
        match = _INSTRUCTION.fullmatch(instruction)
        if not match:
            return None
        operation, negated, predicate, otherwise, operands = match.groups()
        if predicate:
            holds = self.value(predicate, known)
            if holds is None:
                return None
            if bool(holds) == bool(negated):
                return self.value(otherwise, known) if otherwise else None
        name, *details = operation.split(".")
        if any(detail.startswith(("f", "bf")) for detail in details):
            return None  # the registers are taken for integers here
        if name == "scmp":
            name = ".".join((name, *details[:1]))
        numbers = [self._operand(each, known) for each in operands.split(", ")]
        if name not in _OPERATIONS or None in numbers:
            return None
        if "u32" in details and name in _UNSIGNED:
            numbers = [n % 2**32 for n in numbers]
        try:
            return _signed(int(_OPERATIONS[name](*numbers)))
        except (TypeError, ValueError):  # a form of it that is not known here
            return None

    def _stored(self, slot):
        """What is in a spill slot that is written once, before it is read; or None.

        A store that stood in code which is sometimes jumped over would leave what was
        there before. The compiler stores where it defines.
        """
        if slot not in self._slots:
            place = re.escape(f"[smem:[#{slot}]]")
            stores = list(re.finditer(rf" = sst {place} (\S+)", self._text))
            load = self._text.find(f" = sld [smem:[#{slot}]]")
            sound = len(stores) == 1 and stores[0].start() < load
            self._slots[slot] = stores[0][1].lstrip("%") if sound else None
        return self._slots[slot]

    def _operand(self, text, known):
        if text.startswith("%"):
            return self.value(text[1:], known)
        return _signed(int(text)) if text.isdecimal() else None


def _signed(number: int) -> int:
    """The 32 bits of a register as a signed number."""
    return (number + 2**31) % 2**32 - 2**31
