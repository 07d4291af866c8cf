"""Collects the errors and warnings of the library from its sources, for the documentation and its test.

    python tools/docs/messages.py [--all]    # print the page; with --all, every message with its file and line

A value that is known at run time only is `…` in a message.
Text that is built elsewhere, such as an argument's name in a shared check, is followed to literals at the callers.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
#: Stands for a value that is known at run time only.
UNKNOWN = "…"
#: Sections of the page, each with the folders and files that it covers. The first match counts.
SECTIONS = {
    "Context parallelism": ("python/volta_fa/distributed/",),
    "transformers": ("python/volta_fa/integrations/transformers/",),
    "vLLM": ("python/volta_fa/integrations/vllm/",),
    "unsloth": ("python/volta_fa/integrations/unsloth/",),
    "flash-attn": ("python/volta_fa/integrations/flash_attn/", "python/volta_fa/rotary.py", "python/volta_fa/bert_padding.py"),
    "Other programs": ("python/volta_fa/integrations/",),
    "KV cache functions": ("python/volta_fa/kv_cache/",),
    "Command line": ("python/volta_fa/cli/", "python/volta_fa/check/", "python/volta_fa/demo/"),
    "Environment variables and tuning files": ("src/launch/", "src/tuning.rs", "src/log.rs", "src/plan/"),
    "Operators": ("src/", "torch_ops/"),
    "Package": ("python/",),
}
#: Errors that users do not see: control flow within the package.
_INTERNAL = {"NeedsTensor", "_Unsupported", "_Lost", "DeviceLost", "AssertionError", "AttributeError", "NotImplemented"}
#: Functions that return a message.
BUILDERS = {
    "python/volta_fa/library.py": ("_missing",),
    "python/volta_fa/diagnostics.py": ("torch_problem", "driver_problem"),
    "python/volta_fa/distributed/argument_check.py": ("_missing",),
    "src/plan/missing.rs": ("old_device", "no_kernel"),
    "src/launch/load_errors.rs": ("describe",),
}
_ARGUMENT = re.compile(r"(?:volta_fa[\w.…]*: )?(?P<argument>[^:]+(?:: [\w`…]+)?): got (?P<got>.*?), expected (?P<expected>.*)", re.S)


@dataclass(frozen=True)
class Message:
    """One error or warning."""

    text: str
    path: str
    line: int

    @property
    def section(self) -> str:
        """Returns the section of the page that has it."""
        return next(name for name, folders in SECTIONS.items() if self.path.startswith(folders))

    @property
    def parts(self) -> tuple[str, str, str] | None:
        """Returns argument, got and expected of an argument error, None for other messages."""
        found = _ARGUMENT.fullmatch(self.text)
        return (found["argument"], found["got"], found["expected"]) if found else None


@cache
def messages() -> list[Message]:
    """Returns all messages, by file and line."""
    # some only add a prefix to the text of another
    found = (m for m in (*_python(), *_rust(), *_cpp()) if re.search("[a-z]", re.sub(r"^volta_fa[\w.…]*: ", "", m.text)))
    return sorted(set(found), key=lambda m: (m.path, m.line, m.text))


# ---- Python --------------------------------------------------------------------------------------------------------------


def _python() -> Iterator[Message]:
    for path in sorted((REPOSITORY / "python/volta_fa").rglob("*.py")):
        module, name = ast.parse(path.read_text(encoding="utf-8")), str(path.relative_to(REPOSITORY))
        # inner functions come after outer ones, so each node gets the innermost
        functions = [node for node in ast.walk(module) if isinstance(node, (ast.FunctionDef, ast.Module))]
        places = {node: function for function in functions for node in ast.walk(function)}
        for node, function in places.items():
            scopes = (function, module)
            if isinstance(node, ast.Call) and node.args:
                text = _python_message(node, scopes)
                if text:
                    yield Message(text, name, node.lineno)
            elif isinstance(node, ast.Return) and getattr(function, "name", "") in BUILDERS.get(name, ()) and _is_text(node.value):
                yield Message(_python_text(node.value, scopes), name, node.lineno)


def _is_text(node: ast.AST | None) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _python_message(call: ast.Call, scopes: tuple[ast.AST, ...]) -> str | None:
    """Returns the message of a call that makes an error or warns."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "bad_argument":
        argument, got, expected = (_python_text(arg, scopes) for arg in call.args[:3])
        op = next((_python_text(k.value, scopes) for k in call.keywords if k.arg == "op"), "")
        return f"volta_fa{'.' if op else ''}{op}: {argument}: got {got}, expected {expected}"
    is_error = name.endswith("Error") and name not in _INTERNAL and not name.startswith("_")
    return _python_text(call.args[0], scopes) if is_error or name == "warn" else None


def _python_text(node: ast.AST, scopes: tuple[ast.AST, ...]) -> str:
    """Returns the text of an expression in these scopes, innermost first, with `…` for what is not literal."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_python_text(part, scopes) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _python_text(node.left, scopes) + _python_text(node.right, scopes)
    if isinstance(node, ast.Name):
        for scope in scopes:
            texts = _python_values(node, scope)
            if texts:
                return " or ".join(texts)
    return UNKNOWN


def _python_values(name: ast.Name, scope: ast.AST) -> list[str]:
    """Returns the literal last assigned to a name, or the literals of a loop over a tuple whose first variable it is."""
    nodes = scope.body if isinstance(scope, ast.Module) else ast.walk(scope)
    before = [node for node in nodes if isinstance(node, (ast.Assign, ast.For)) and node.lineno < name.lineno]
    for node in sorted(before, key=lambda node: -node.lineno):
        if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == [name.id]:
            return [_python_text(node.value, (scope,))] if _is_text(node.value) else []
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
            first = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
            items = [item.elts[0] if isinstance(item, ast.Tuple) else item for item in node.iter.elts]
            if getattr(first, "id", "") == name.id:
                return [str(item.value) for item in items if isinstance(item, ast.Constant)]
    return []


# ---- Rust and C++ ----------------------------------------------------------------------------------------------------------

_STRING = r'"(?:[^"\\]|\\.)*"'
_CPP_CALL = re.compile(r"\b(TORCH_CHECK\w*|TORCH_WARN)\(")
_RUST_CALL = re.compile(r"\bError::(value|unsupported|runtime)\(|(?<!fn )\b(warn)\(")
_WORDS = {"shape": f"shape {UNKNOWN}", "rank": f"a tensor of rank {UNKNOWN} with shape {UNKNOWN}"}


@cache
def _sources(folder: str, suffixes: tuple[str, ...]) -> dict[str, str]:
    """Returns the text of each file, without comments."""
    comments = re.compile(rf"({_STRING})|//[^\n]*", re.S)
    paths = (path for path in sorted((REPOSITORY / folder).rglob("*")) if path.suffix in suffixes)
    return {
        str(path.relative_to(REPOSITORY)): comments.sub(lambda found: found[1] or "", path.read_text(encoding="utf-8")) for path in paths
    }


def _arguments(source: str, start: int) -> list[str]:
    """Returns the arguments of a call whose first argument begins at `start`."""
    depth, begin, found, at = 0, start, [], start
    while depth >= 0:
        string = re.compile(_STRING, re.S).match(source, at)
        character = source[at]
        at = string.end() if string else at + 1
        depth += 0 if string else (character in "([{") - (character in ")]}")
        if depth < 0 or (depth == 0 and character == "," and not string):
            found.append(source[begin : at - 1].strip())
            begin = at
    return [argument for argument in found if argument]


def _literal(text: str) -> str:
    """Returns the text of a string literal, without its line breaks."""
    return re.sub(r"\\\n\s*", "", text[1:-1]).replace('\\"', '"')


def _cpp() -> Iterator[Message]:
    for path, source in _sources("torch_ops", (".cpp", ".h")).items():
        for call in _CPP_CALL.finditer(source):
            arguments = _arguments(source, call.end())[0 if call[1] == "TORCH_WARN" else 1 :]
            parts = (_cpp_text(argument, source) for argument in arguments)
            yield Message("".join(parts), path, source.count("\n", 0, call.start()) + 1)


def _cpp_text(argument: str, source: str) -> str:
    """Returns the text of string literals, or of the constant with this name; `…` for other expressions."""
    constant = re.search(rf"constexpr [^;]*\b{argument}(?:\[\])? =\s*((?:{_STRING}\s*)+);", source) if argument.isidentifier() else None
    literals = re.findall(_STRING, constant[1] if constant else argument, re.S)
    return "".join(map(_literal, literals)) or UNKNOWN


def _rust() -> Iterator[Message]:
    for path, source in _sources("src", (".rs",)).items():
        for call in _RUST_CALL.finditer(source):
            line = source.count("\n", 0, call.start()) + 1
            given = [_rust_texts(argument, source, call.start()) for argument in _arguments(source, call.end())]
            if call[1] == "value":
                argument, got, expected = (" or ".join(texts) for texts in given)
                yield Message(f"{argument}: got {got}, expected {expected}", path, line)
            else:
                yield from (Message(text, path, line) for text in given[0])
        for builder in BUILDERS.get(path, ()):
            begin = source.index(f"fn {builder}(")
            indent = re.search(r"[ ]*(?=\S[^\n]*$|$)", source[source.rindex("\n", 0, begin) + 1 : begin])[0]
            body = source[begin : source.index(f"\n{indent}}}", begin)]
            texts = re.finditer(rf"(?:format!|write!)\(\s*(?:text, )?({_STRING})", body)
            yield from (
                Message(_placeholders(text[1]), path, source.count("\n", 0, begin + text.start()) + 1)
                for text in texts
                if len(text[1]) > 40
            )


def _rust_texts(expression: str, source: str, at: int, depth: int = 0) -> list[str]:
    """Returns the texts that an expression at this place can have, with `…` for what is not literal."""
    expression = re.sub(r"^&?(?:of\()?|\.(?:into|to_string)\(\)$", "", expression)
    literal = re.match(rf"(?:format!\(\s*)?({_STRING})", expression, re.S)
    if literal:
        return [_placeholders(literal[1], source)]
    called = re.match(r"(\w+)\(", expression)
    if called:
        return [_WORDS.get(called[1], UNKNOWN)]
    return (_rust_values(expression, source, at, depth) if re.fullmatch(r"\w+", expression) else []) or [UNKNOWN]


def _placeholders(literal: str, source: str = "") -> str:
    """Returns the text of a literal of `format!` with `…` for values, and with the values of constants."""
    return re.sub(r"\{(\w*)[^}]*\}", lambda name: _constant(name[1], source), _literal(literal))


def _constant(name: str, own: str = "") -> str:
    """Returns the value of a constant, preferably of its own file; `…` for other names."""
    for source in (own, *_sources("src", (".rs",)).values()):
        found = re.search(rf"const {name}: [^=]*= ([\d_]+|{_STRING});", source) if name.isupper() else None
        if found:
            return found[1].strip('"').replace("_", "" if found[1][0].isdigit() else "_")
    return UNKNOWN


def _rust_values(name: str, source: str, at: int, depth: int) -> list[str]:
    """Returns the texts of a name: a constant, a local variable, the first name of a loop over tuples, or a parameter."""
    if name.isupper():
        return [_constant(name, source)]
    function = [*re.finditer(r"\bfn (\w+)(?:<[^>]*>)?\(", source[:at])][-1:]
    body = source[function[0].start() if function else 0 : at]
    assigned = [*re.finditer(rf"\blet {name} =\s*([^;]*);", body)]
    if assigned:
        return _rust_texts(assigned[-1][1], source, at, depth)
    loop = re.search(rf"\bfor \({name}\b[^\n]*? in \[(.*?)\] \{{", body, re.S)
    if loop:
        return [_literal(found) for found in re.findall(rf"\(({_STRING})", loop[1])]
    if not function or depth > 3:
        return []
    names = [parameter.split(":")[0] for parameter in _arguments(source, function[0].end())]
    if name not in names:
        return []
    texts: list[str] = []
    for other in _sources("src", (".rs",)).values():
        for call in re.finditer(rf"\b{function[0][1]}\((?<!fn {function[0][1]}\()", other):
            given = _arguments(other, call.end())
            if len(given) == len(names):
                texts += _rust_texts(given[names.index(name)], other, call.start(), depth + 1)
    return sorted(dict.fromkeys(texts), key=lambda text: text == UNKNOWN)


# ---- the page ------------------------------------------------------------------------------------------------------------


def page() -> str:
    """Returns the page of argument errors: one table for each section."""
    lines = ["# Argument errors", ""]
    lines += ["Each row is an error `argument: got X, expected Y` of the sources. The remedy is to pass what is expected."]
    lines += [f"`{UNKNOWN}` stands for a value of the call, and for arguments that only the call names."]
    lines += ["[Troubleshooting](../guides/troubleshooting.md) has all other messages, and what usually causes these."]
    found = messages()
    for section in SECTIONS:
        rows = sorted({m.parts for m in found if m.section == section and m.parts}, key=lambda row: (row[0].strip("`…").lower(), row))
        if rows:
            lines += ["", f"## {section}", "", "| Argument | Got | Expected |", "| --- | --- | --- |"]
            for argument, *values in rows:
                names = ", ".join(name if name == UNKNOWN else f"`{name}`" for name in argument.replace("`", "").split(" or "))
                lines.append("| " + " | ".join((names, *(value.replace("|", "\\|") for value in values))) + " |")
    return "\n".join([*lines, ""])


def main(arguments: list[str]) -> None:
    if "--all" not in arguments:
        sys.stdout.write(page())
        return
    for message in messages():
        print(f"{message.path}:{message.line}: {'' if message.parts else '* '}{message.text}")


if __name__ == "__main__":
    main(sys.argv[1:])
