"""The Lua scripts: their texts, put together of files, and how each is called. No I/O.

A script file opens with a comment that declares its KEYS and ARGV (see signature.py) and says what it returns. In the
text that Redis gets, the blank line behind this comment defines the declared names as locals. So the line numbers in
Redis' error messages are those of the file, up to the first include. `-- include NAME` lines pull in lua/lib/NAME.lua,
each once, and `-- include FOLDER/NAME` pulls in lua/FOLDER/NAME.lua. A setting in angle brackets stands for its value:
`-- include policies/<policy>`. `-- include place(SETTINGS, KEYS, ARGV)` makes a Lua function of a whole script, which
reads its settings from a table. `-- include whole place` pulls in a whole script as it is. Functions that a script
never calls are left out, and numbers stand in the place of their names (`local MOST_PATIENT = 8`): a function of Redis'
Lua has 200 locals at most, and `place` had come near. On Redis >= 7 a `#!lua flags=allow-oom` line is put in front, so
that coordination continues when chunks have filled the memory; Redis 6.2 does not know that line.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any

from coordinator import breaker
from coordinator.policy_knobs import PolicyKnobs
from coordinator.signature import Flattener, Signature, flattener, lua_locals, read_signature

SHEBANG = "#!lua flags=allow-oom\n"
_LUA = files(__package__) / "lua"
NAMES = tuple(sorted(file.name.removesuffix(".lua") for file in _LUA.iterdir() if file.name.endswith(".lua")))
"""The names of all scripts. Each script is a file of lua/."""
LATER = ("pair", "route")
"""Scripts that a server gets when they are called first. Few clusters need them, and Redis gets slower with all code
that it keeps."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text and its SHA1, the name Redis knows it by.

    `operands(keys, replica="r0", …)` makes what EVALSHA takes behind the digest: numkeys, KEYS and ARGV.
    """

    name: str
    text: str
    sha: str
    operands: Flattener


@cache
def _file(name: str) -> str:
    return (_LUA / f"{name}.lua").read_text()


@cache
def signature(name: str) -> Signature:
    """The KEYS and ARGV that a script's header declares."""
    return read_signature(name, _file(name))


@cache
def local_line(name: str, knobs: PolicyKnobs | None = None) -> str:
    """The line of Lua that gives names to a script's settings, keys and arguments."""
    return lua_locals(signature(name), _settings(knobs))


def _settings(knobs: PolicyKnobs | None) -> dict[str, Any]:
    """The settings of `place`."""
    settings = asdict(knobs or PolicyKnobs())
    return {"policy": settings.pop("name"), "probe_ms": breaker.OPEN_MS, **settings}


@cache
def source(name: str, knobs: PolicyKnobs | None = None) -> str:
    """The text of a script with its locals and includes, without a shebang. `knobs` are the settings of `place`."""
    settings = _settings(knobs)
    header, _, body = _file(name).partition("\n\n")
    text = _lean(_with_includes(f"{header}\n{local_line(name, knobs)}\n{body}", settings, set()))
    text = _AS_FUNCTION.sub(lambda include: as_function(include[1]), text)
    return _WHOLE.sub(lambda include: source(include[1], knobs), text)


_WHOLE = re.compile(r"^-- include whole (\w+)$", re.MULTILINE)
_AS_FUNCTION = re.compile(r"^-- include (\w+)\(.*\)$", re.MULTILINE)
_FUNCTION = re.compile(r"(?:^--.*\n)*^local function (\w+)\(.*\n(?:.*\n)*?end\n\n?", re.MULTILINE)
_CONSTANTS = re.compile(r"^local ([A-Z][A-Z_]*(?:, [A-Z][A-Z_]*)*) = ([\d.e*/, ]+)(?=$| --)", re.MULTILINE)
_WORD, _NAME, _COMMENT = re.compile(r"\w+"), re.compile(r"(?<![.\w'])[A-Z][A-Z_]*\b(?! = )"), re.compile(r"--.*")


def _lean(text: str) -> str:
    """Without what costs a script locals for nothing."""
    return _with_numbers(_without_unused(text))


def _with_numbers(text: str) -> str:
    """With the numbers of constants in the place of their names. Line numbers stay."""
    numbers: dict[str, str] = {}
    for names, values in _CONSTANTS.findall(text):
        told = dict(zip(names.split(", "), (f"({each.strip()})" for each in values.split(", ")), strict=True))
        assert not told.keys() & numbers.keys(), f"{names}: defined twice"
        numbers |= told
    text = _CONSTANTS.sub("", text)
    return _NAME.sub(lambda name: numbers.get(name[0], name[0]), text)


def _without_unused(text: str) -> str:
    """Without the functions of the includes that the script never calls. Each run makes all functions anew, and Redis'
    Lua gets slower with all code that it keeps (see bench/place.py)."""
    functions = {found[1]: found for found in _FUNCTION.finditer(text)}
    named, unused = Counter(_words(text)), list[re.Match[str]]()
    while found := [functions.pop(name) for name in list(functions) if named[name] == 1]:
        unused += found
        for one in found:  # those that it calls may be unused, too
            named.subtract(_words(one[0]))
    for one in sorted(unused, key=lambda one: one.start(), reverse=True):
        text = text[: one.start()] + text[one.end() :]
    return text


def _words(text: str) -> list[str]:
    return _WORD.findall(_COMMENT.sub("", text))


def _with_includes(text: str, settings: dict[str, Any] | None, seen: set[str]) -> str:
    def included(match: re.Match[str]) -> str:
        file = match[1]
        if "<" in file and settings is None:
            return _each_of(file)
        file = re.sub(r"<(\w+)>", lambda setting: str((settings or {})[setting[1]]), file)
        if file in seen:
            return ""
        seen.add(file)
        text = (_LUA / f"{file if '/' in file else f'lib/{file}'}.lua").read_text()
        return _with_includes(text, settings, seen)

    return re.sub(r"^-- include ([^( \n]+)$", included, text, flags=re.MULTILINE)


@cache
def as_function(name: str) -> str:
    """A script as a function, without comments. It takes no seats itself: it is what a grant calls."""
    body = _file(name).partition("\n\n")[2]
    text = _lean(re.sub(r"^ *--.*\n", "", _with_includes(body, None, {"steps/turn"}), flags=re.MULTILINE))
    return f"local function {name}(SETTINGS, KEYS, ARGV)\n{lua_locals(signature(name), None)}\n{text}\nend"


def _each_of(pattern: str) -> str:
    """The files that `<setting>` in an include can mean, of which the script runs one."""
    folder, _, setting = pattern.partition("/")
    branches = [
        f"{'else' if at else ''}if {setting.strip('<>')} == '{file.name.removesuffix('.lua')}' then\n{file.read_text()}"
        for at, file in enumerate(sorted((_LUA / folder).iterdir(), key=lambda file: file.name))
    ]
    return "\n".join([*branches, "end"])


@cache
def load(name: str, allow_oom: bool, knobs: PolicyKnobs | None = None) -> Script:
    """The script as it is sent to the server. `knobs` are the settings of `place`."""
    text = (SHEBANG if allow_oom else "") + source(name, knobs)
    sha = sha1(text.encode(), usedforsecurity=False).hexdigest()
    return Script(name, text, sha, flattener(signature(name)))
