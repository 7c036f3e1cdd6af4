"""The child of a cage: it works on a checkpoint's template or tokenizer, and can reach nothing but the pipe to us.

It is run as a script, without an environment, and must import nothing of onegraph. What it needs it imports before it
shuts itself in; from then on it has no files, no network and no other processes, a bounded memory, and a bounded time
for each request. Each side writes a message as its length in 8 bytes and then JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import importlib
import json
import os
import re
import resource
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

MAX_TEMPLATE = 1 << 20  # characters
MAX_OUTPUT = 16 << 20  # characters

_LATE = ("html", "jinja2.constants", "jinja2.debug", "pprint", "textwrap", "unicodedata")  # what jinja2 imports in use

# Numbers of the system calls that it may still make: read, write, close, fstat, lseek; memory; signals and timers;
# clocks, futex, random numbers, exit. All others, among them open, socket, clone, execve and kill, fail.
_CALLS = {
    "x86_64": (0xC000003E, (0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 28, 38, 39, 60, 96, 186, 202, 228, 230,
                            231, 318)),
    "aarch64": (0xC00000B7, (63, 64, 57, 80, 62, 222, 226, 215, 214, 134, 135, 139, 124, 216, 233, 103, 172, 93, 169,
                             178, 98, 113, 115, 94, 278)),
}  # fmt: skip


class _Instruction(ctypes.Structure):  # here, since from Python 3.14 on ctypes imports what lays a structure out
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


def enter_sandbox() -> bool:
    """Gives up every right but to compute; whether the kernel's filter of system calls stands too (seccomp)."""
    os.chdir("/")
    for number in map(int, os.listdir("/proc/self/fd")):  # libffi keeps its own file open
        if number > 2:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(number)
    for name in ("CORE", "FSIZE", "NPROC", "NOFILE"):  # the last: what is open stays so, and no file or socket follows
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (0, 0))
    return _filter_calls()


def _filter_calls() -> bool:
    machine = os.uname().machine
    if machine not in _CALLS:
        return False
    arch, allowed = _CALLS[machine]
    load, equal, give = 0x20, 0x15, 0x06  # the words of BPF: load from the call's record, compare, return
    refuse = len(allowed) + 1
    program = [(load, 0, 0, 4), (equal, 0, refuse, arch), (load, 0, 0, 0)]
    program += [(equal, refuse - 1 - i, 0, number) for i, number in enumerate(allowed)]
    program += [(give, 0, 0, 0x00050001), (give, 0, 0, 0x7FFF0000)]  # EPERM, or allow

    filter_ = _Program(len(program), (_Instruction * len(program))(*[_Instruction(*words) for words in program]))
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    if prctl(no_new_privileges, 1, 0, 0, 0) != 0:
        return False
    return bool(prctl(set_seccomp, mode_filter, ctypes.addressof(filter_), 0, 0) == 0)


def _generation() -> type:
    """The tag {% generation %} of published templates (SmolLM3's): transformers marks what the model wrote with it, to
    train on that alone; the text is that of its body."""
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 (as the base class has it)

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    return Generation


def _raiser() -> Callable[[str], None]:
    """raise_exception of the templates, a function that leads to nothing: no globals, no builtins, no closure."""

    def raise_exception(message: str, error: type[Exception] = ValueError) -> None:
        raise error(message)

    return types.FunctionType(raise_exception.__code__, {"__builtins__": {}}, "raise_exception", (ValueError,))


class Templates:
    """Renders chat templates."""

    def __init__(self) -> None:
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        for name in _LATE:
            importlib.import_module(name)

        def to_json(value: Any, indent: int | None = None, **_: Any) -> str:
            return json.dumps(value, ensure_ascii=False, indent=indent)

        # Set up as in transformers, so that published templates render the same
        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _generation()]
        )
        sandbox.filters["tojson"] = to_json
        sandbox.globals["raise_exception"] = _raiser()
        self._compiled = functools.lru_cache(maxsize=2)(sandbox.from_string)
        self.render("{{ 'a\n' | trim }}{{ strftime_now('%d %b %Y') }}", [], {})  # loads codecs and the time zone

    def render(self, template: str, messages: list[dict[str, str]], variables: dict[str, Any]) -> str:
        if len(template) > MAX_TEMPLATE:
            raise ValueError(f"template of {len(template)} characters, at most {MAX_TEMPLATE} are allowed")
        # A bound method of a date leads to no function of Python, whose globals would lead to every module.
        given = {"strftime_now": datetime.datetime.now().strftime, "add_generation_prompt": True}
        variables = given | {"tools": None, "documents": None} | variables  # "tools is not none", templates ask
        text = self._compiled(template).render(messages=messages, **variables)
        if len(text) > MAX_OUTPUT:
            raise ValueError(f"output of {len(text)} characters, at most {MAX_OUTPUT} are allowed")
        return text


def _flat(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The normalizers or pre-tokenizers that one consists of."""
    if part is None:
        return []
    return [each for inner in part[key] for each in _flat(inner, key)] if part["type"] == "Sequence" else [part]


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte: printable ones stand for themselves, the rest move up from U+0100."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in plain else next(spare)) for byte in range(256)]


class Tokenizers:
    """Holds one tokenizer.json and runs it."""

    def __init__(self) -> None:
        import tokenizers

        self._library = tokenizers

    def load(self, content: str) -> dict[str, Any]:
        """Takes a tokenizer.json. Its control tokens (text -> id), but for the one that stands for unknown text."""
        self._tokenizer = self._library.Tokenizer.from_str(content)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._guards: dict[str, str] = {}
        model = self._tokenizer.model
        if hasattr(model, "unk_token"):
            unknown = model.unk_token and self._tokenizer.token_to_id(model.unk_token)
        else:  # Unigram says it nowhere else
            unknown = json.loads(content)["model"].get("unk_id")
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token.content: i for i, token in added.items() if token.special and i != unknown}
        return self._special

    def token_bytes(self) -> list[tuple[int, str, bool]]:
        """(id, its bytes in hexadecimal, whether it is a control token) of every token."""
        write = self._write
        guards = set(self._guards.values())
        added = self._tokenizer.get_added_tokens_decoder()
        found = {i: (write(token), False) for token, i in self._tokenizer.get_vocab(with_added_tokens=False).items()}
        found |= {i: (write(t.content), t.special) for i, t in added.items() if t.content not in guards}
        return [(i, data.hex(), special) for i, (data, special) in found.items()]

    def bytes_of(self, ids: list[int]) -> list[str]:
        """The bytes of each token in hexadecimal."""
        added = self._tokenizer.get_added_tokens_decoder()
        tokens = [added[i].content if i in added else self._tokenizer.id_to_token(i) or "" for i in ids]
        return [self._write(token).hex() for token in tokens]

    @functools.cached_property
    def _write(self) -> Callable[[str], bytes]:
        return self._writer()

    def _writer(self) -> Callable[[str], bytes]:
        """The bytes that a token of the vocabulary stands for, as the decoder writes them."""
        decoder = json.loads(self._tokenizer.to_str())["decoder"] or {}
        parts = {part["type"]: part for part in decoder.get("decoders", [decoder]) if part}
        if "ByteLevel" in parts:
            letters = {letter: byte for byte, letter in enumerate(_byte_letters())}
            return lambda token: bytes(letters[c] for c in token) if letters.keys() >= set(token) else token.encode()
        if not parts.keys() & {"Replace", "Metaspace"}:
            raise ValueError(f"the bytes of its tokens are not known to decoders {sorted(parts)}")
        blank = parts["Metaspace"]["replacement"] if "Metaspace" in parts else parts["Replace"]["pattern"]["String"]
        byte = re.compile("<0x([0-9A-F]{2})>")

        def write(token: str) -> bytes:
            if "ByteFallback" in parts and (found := byte.fullmatch(token)):
                return bytes.fromhex(found[1])
            return token.replace(blank, " ").encode()

        return write

    def longest(self) -> int | None:
        """Bytes of text that a token stands for at most; None where some part may drop or shorten text otherwise."""
        parts = json.loads(self._tokenizer.to_str())
        model, factor = parts["model"], 1
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        cuts = _flat(parts["pre_tokenizer"], "pretokenizers")
        bytes_ = _byte_letters() if any(cut["type"] == "ByteLevel" for cut in cuts) else []
        if model.get("byte_fallback"):
            bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        if model["type"] != "BPE" or not bytes_ or not vocabulary.keys() >= set(bytes_):
            return None  # what it does not know it may drop, or join to one token
        for change in _flat(parts["normalizer"], "normalizers"):
            old = change.get("pattern", {}).get("String") if change["type"] == "Replace" else None
            if change["type"] == "NFC":
                factor = 3  # three letters of Hangul, of 3 bytes each, are one of 3
            elif change["type"] != "Prepend" and (old is None or len(old.encode()) > len(change["content"].encode())):
                return None
        kept = {"ByteLevel", "Digits", "Metaspace", "Split"}
        if any(cut["type"] not in kept or cut.get("behavior") == "Removed" for cut in cuts):
            return None
        if any(token.lstrip or token.rstrip for token in self._tokenizer.get_added_tokens_decoder().values()):
            return None  # it takes blanks along
        try:
            return factor * max(len(data) // 2 for _, data, _ in self.token_bytes())
        except ValueError:
            return None

    def index(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def encode_parts(self, parts: list[str]) -> list[int]:
        """Ids of the joined text of [trusted, untrusted, trusted, ...]: control tokens count in trusted parts only.

        It is encoded in one go, so that tokens reach over the parts' borders as they would in any text: in trusted
        parts control tokens go by names that nobody can guess, and their own names mean nothing meanwhile.
        """
        self._guard()
        names = sorted(map(re.escape, self._guards), key=len, reverse=True)  # the longest first, as the library does
        pattern = re.compile("|".join(names))
        text = "".join(
            part if i % 2 else pattern.sub(lambda found: self._guards[found.group()], part)
            for i, part in enumerate(parts)
        )
        back = {self._tokenizer.token_to_id(guard): self._special[name] for name, guard in self._guards.items()}
        self._tokenizer.encode_special_tokens = True
        try:
            ids = self.encode(text, False)
        finally:
            self._tokenizer.encode_special_tokens = False
        if left := set(ids) & set(self._special.values()):
            shown = next(name for name, i in self._special.items() if i in left)
            raise ValueError(f"this tokenizer reads {shown!r} as a control token however it is written")
        return [back.get(i, i) for i in ids]

    def _guard(self) -> None:
        if self._guards:
            return
        added = self._tokenizer.get_added_tokens_decoder()
        tokens = [added[i] for i in self._special.values()]
        self._guards = {token.content: f"\U000f0000{os.urandom(16).hex()}\U000f0001" for token in tokens}
        guards = [
            self._library.AddedToken(
                self._guards[token.content], lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False
            )
            for token in tokens
        ]
        self._tokenizer.add_tokens(guards)

    def decode(self, rows: list[list[int]], special: bool) -> list[str]:
        return [self._tokenizer.decode(row, skip_special_tokens=not special) for row in rows]


class Grammars:
    """Compiles a grammar to see whether it can be done in this process's memory and time."""

    def __init__(self) -> None:
        import llguidance

        class Bytes:
            bos_token_id, eos_token_id, special_token_ids = None, 256, (256,)
            tokens = (*(bytes([i]) for i in range(256)), b"<end>")

            def __call__(self, text: Any) -> list[int]:
                if not isinstance(text, str):  # it tries whether bytes are taken
                    raise TypeError("text is expected")
                return list(text.encode())

        self._matcher = llguidance.LLMatcher
        self._tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))

    def check(self, kind: str, text: str) -> str:
        """llguidance's error for a "json_schema", a "regex" or a "grammar", empty where there is none. Tokens that a
        grammar names by id are one of this process's."""
        if kind == "grammar":
            text = re.sub(r"<\[\d+\]>", "<[256]>", text)
        matcher = self._matcher(self._tokens, grammar(self._matcher, kind, text), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        error: str = matcher.get_error() if matcher.is_error() else ""
        return error


def grammar(matcher: Any, kind: str, text: str) -> str:
    """llguidance's grammar for a "json_schema", a "regex" or a "grammar"; matcher: its class LLMatcher."""
    kinds = {
        "json_schema": matcher.grammar_from_json_schema,
        "regex": matcher.grammar_from_regex,
        "grammar": matcher.grammar_from_lark,
    }
    made: str = kinds[kind](text)
    return made


def serve(worker: object) -> None:
    """Answers requests until the pipe ends. A request that takes more than its seconds of CPU time is the last."""
    while (request := _read()) is not None:
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # SIGPROF, which nothing handles, ends the process
        try:
            reply = {"result": getattr(worker, request["call"])(**request["arguments"])}
        except MemoryError:
            os._exit(1)
        except BaseException as error:  # a template's failure may be any, a panic of Rust's is no Exception
            plain = type(error).__name__ in ("Exception", "PanicException", "ValueError")
            name = "" if plain and str(error) else f"{type(error).__name__}: "
            reply = {"error": f"{name}{error}"[:500]}
        data = json.dumps(reply).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(data)


def _read() -> Any:
    """The next message; None where the pipe has ended."""
    head = sys.stdin.buffer.read(8)
    return json.loads(sys.stdin.buffer.read(int.from_bytes(head, "little"))) if len(head) == 8 else None


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(len(data).to_bytes(8, "little") + data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    kind, *path = sys.argv[1:]
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    sys.path[:] = path
    worker = {"templates": Templates, "tokenizers": Tokenizers, "grammars": Grammars}[kind]()
    if (first := _read()) is None:  # started early, and not needed
        sys.exit()
    highest = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = first["memory"] if highest == resource.RLIM_INFINITY else min(first["memory"], highest)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _write(json.dumps({"result": enter_sandbox()}).encode())
    serve(worker)
