"""What a script takes, declared once: in the header of its Lua file.

    -- KEYS
    --   hash    replicas, owned_tokens
    --   zset    held:<replica>
    --   hash    own:<key>...: shallow to deep
    -- ARGV
    --   text    replica
    --   number  before_ms: keys that were used at this time or later are kept
    --   flag    leaving
    --   text    keys...: in the order of own

A third section, SETTINGS, names values that are the same in all calls of a gateway. They are not sent with a call: they
are part of the script's text, so its digest stands for them. `all_settings()` returns them as a table. The text of such
a script can also be a function in other scripts, which takes this table (see scripts.py): there `is_kept` is true.

Each line has a kind, names, and after a colon an explanation; lines that are indented deeper continue it. The kind of a
key is its type in Redis; the kind of an argument is `text`, `number` or `flag`. Three forms stand for several values:

    tokens...                       all that follow
    settled(event, reservation)...  the same, in groups
    kept[kept_count]                as many as the argument `kept_count` says, which Python fills in

Two things are made from a header:

`lua_locals` makes one line of Lua that defines `replicas_key`, `held_key`, `replica` (text), `before_ms` (a number) and
`leaving` (a boolean). Values of these forms stay in KEYS or ARGV, as text: KEYS[OWN_OFFSET + i] is the i-th of `own`,
and ARGV[KEYS_OFFSET + i] the i-th of `keys`. For groups, SETTLED_SIZE is the number of their fields.

`flattener` makes a Python function that takes the arguments by name and returns what EVALSHA takes behind the digest:
numkeys, KEYS and ARGV. A call that does not fit raises TypeError, like that of any Python function. A pool's PoolKeys
spell the KEYS: `held:<replica>` is `keys.held(replica)`, and `own:<key>...` is `keys.own(key)` for each of the argument
`keys`. A key that PoolKeys does not have is an argument itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

from blake3 import blake3

from coordinator.keys import PoolKeys

HEADER = re.compile(r"(?:--.*\n)+")
Flattener = Callable[..., tuple[Any, ...]]
_LINE = re.compile(r"--   (\w+) +(\S.*)")
_NAME = re.compile(r"(\w+)(?::<(\w+)>)?(?:\((\w+(?:, \w+)*)\))?(?:(\.\.\.)|\[(\w+)\])?(?:, |$)")
_PLAIN = re.compile(r"\w+")
_LUA_VALUES = {"number": "tonumber({})", "flag": "{} == '1'"}
_KINDS = {
    "SETTINGS": ("text", "number"),
    "KEYS": ("hash", "zset", "string", "list", "stream"),
    "ARGV": ("text", "number", "flag"),
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One name in a header."""

    kind: str
    name: str
    of: str = ""
    """What a key is named after: `replica` in `held:<replica>`."""
    fields: tuple[str, ...] = ()
    """Of each group."""
    is_many: bool = False
    count: str = ""
    """The argument that says how many there are; empty if all to the end."""

    @property
    def is_spelled(self) -> bool:
        """Whether PoolKeys spells this key."""
        return hasattr(PoolKeys, self.name)

    @property
    def argument(self) -> str:
        """The Python argument that a key is made from; empty for a key that a pool has only once."""
        if not self.is_spelled:
            return self.name
        return f"{self.of}s" if self.of and self.is_many else self.of


@dataclass(frozen=True, slots=True)
class Signature:
    """What the header of one script declares, in order."""

    script: str
    keys: tuple[Parameter, ...]
    args: tuple[Parameter, ...]
    settings: tuple[Parameter, ...] = ()
    layout: str = ""
    """A digest of the header: it differs if a version takes other values, or in another form."""


def read_signature(script: str, text: str) -> Signature:
    """Raises ValueError if the header declares it wrongly."""
    header = HEADER.match(text)
    found: dict[str, list[Parameter]] = {section: [] for section in _KINDS}
    section: str | None = None
    for line in header[0].splitlines() if header else ():
        if line[3:] in _KINDS:
            section = line[3:]
        elif declared := _LINE.fullmatch(line):
            if section is None:
                raise ValueError(f"{script}.lua: {line} is under no section")
            found[section] += _parameters(script, section, declared[1], declared[2].partition(": ")[0])
    layout = blake3(header[0].encode() if header else b"").hexdigest(4)
    return Signature(script, tuple(found["KEYS"]), tuple(found["ARGV"]), tuple(found["SETTINGS"]), layout)


def _parameters(script: str, section: str, kind: str, names: str) -> Iterator[Parameter]:
    found = list(_NAME.finditer(names))
    if kind not in _KINDS[section] or "".join(each[0] for each in found) != names:
        raise ValueError(f"{script}.lua: cannot read the header at {kind} {names}")
    for name, of, fields, all_left, count in (each.groups(default="") for each in found):
        yield Parameter(kind, name, of, tuple(fields.split(", ")) if fields else (), bool(all_left or count), count)


def lua_locals(signature: Signature, settings: Mapping[str, str | float] | None = MappingProxyType({})) -> str:
    """One line of Lua that gives each declared value its name. Without `settings` they are in a Lua table SETTINGS.

    Raises KeyError if a setting is missing, ValueError if its value is not of its kind.
    """
    names, values, offsets = list[str](), list[str](), list[str]()
    for one in signature.settings:
        names.append(one.name)
        values.append(f"SETTINGS.{one.name}" if settings is None else _constant(one, settings[one.name]))
    for array, parameters in (("KEYS", signature.keys), ("ARGV", signature.args)):
        offset = str(sum(not one.is_many for one in parameters))
        for at, one in enumerate(parameters, 1):
            if one.is_many:
                constant = f"{one.name.upper()}_OFFSET"
                offsets.append(f"local {constant} = {offset}")
                offset = f"{constant} + {one.count}"
                if one.fields:
                    offsets.append(f"local {one.name.upper()}_SIZE = {len(one.fields)}")
            else:
                names.append(f"{one.name}_key" if array == "KEYS" else one.name)
                values.append(_LUA_VALUES.get(one.kind, "{}").format(f"{array}[{at}]"))
    if signature.settings:
        table = ", ".join(f"{one.name} = {one.name}" for one in signature.settings)
        offsets.append(f"local is_kept = {'true' if settings is None else 'false'}")
        offsets.append(f"local LAYOUT = '{signature.layout}'")
        offsets.append(f"local function all_settings() return {{ layout = LAYOUT, {table} }} end")
    if names:
        offsets.insert(0, f"local {', '.join(names)} = {', '.join(values)}")
    return " ".join(offsets)


def _constant(setting: Parameter, value: str | float) -> str:
    """A setting's value as Lua."""
    if setting.kind == "text" and isinstance(value, str) and _PLAIN.fullmatch(value):
        return f"'{value}'"
    if setting.kind == "number" and not isinstance(value, str) and math.isfinite(value):
        return repr(value)
    raise ValueError(f"{setting.name}: {value!r} is no {setting.kind}")


def flattener(signature: Signature) -> Flattener:
    """A function of PoolKeys and the arguments by name. Its code is generated once: `place` is on the request path."""
    counts = {one.count: one.argument for one in signature.keys if one.count}
    counts |= {one.count: one.name for one in signature.args if one.count}
    needed = dict.fromkeys(
        (
            *(one.argument for one in signature.keys if one.argument),
            *(one.name for one in signature.args if one.name not in counts),
        )
    )
    several = [f"len({one.argument})" for one in signature.keys if one.is_many]
    numkeys = " + ".join([str(len(signature.keys) - len(several)), *several])
    values = [
        numkeys,
        *map(_key, signature.keys),
        *[_argument(one, counts) for one in signature.args],
    ]
    code = f"def {signature.script}(k=None, /, *, {', '.join(needed)}):\n return ({', '.join(values)},)"
    namespace: dict[str, Any] = {"flat": chain.from_iterable}
    exec(code, namespace)  # noqa: S102 - of nothing but the names in a header, as dataclasses do
    made: Flattener = namespace[signature.script]
    return made


def _key(one: Parameter) -> str:
    """Python for one key, or for a row of them."""
    if not one.is_spelled:
        return f"*{one.name}" if one.is_many else one.name
    if one.is_many:
        return f"*map(k.{one.name}, {one.argument})"
    return f"k.{one.name}({one.of})" if one.of else f"k.{one.name}"


def _argument(one: Parameter, counts: dict[str, str]) -> str:
    """Python for one argument, or for a row of them."""
    if one.fields:
        return f"*flat({one.name})"
    if one.is_many:
        return f"*{one.name}"
    if one.name in counts:
        return f"len({counts[one.name]})"
    return f"1 if {one.name} else 0" if one.kind == "flag" else one.name
