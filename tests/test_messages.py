"""docs/guides/troubleshooting.md against the errors and warnings in the sources."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def load_tool():
    spec = importlib.util.spec_from_file_location("messages", REPOSITORY / "tools/docs/messages.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


tool = load_tool()


def guide_literals() -> list[str]:
    """Returns the code spans in the first cell of each row of the guide."""
    guide = (REPOSITORY / "docs/guides/troubleshooting.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (.*?) \| ", guide.replace("\\|", ""), re.M)
    return [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]


def fits(literal: str, text: str) -> bool:
    """Returns True if a literal, in which `...` stands for anything, is part of a text."""
    return re.search(".*".join(map(re.escape, literal.split("..."))), text, re.S) is not None


def test_every_message_is_in_the_guide():
    """Except argument errors, which reference/errors.md lists."""
    literals = [literal for literal in guide_literals() if " " in literal or literal.startswith("--")]
    missing = [m for m in tool.messages() if m.parts is None and not any(fits(literal, m.text.replace("`", "")) for literal in literals)]
    assert not missing, "add a row with the remedy to docs/guides/troubleshooting.md"


def test_every_literal_of_the_guide_is_in_the_sources():
    sources = [path for folder in ("python", "src", "torch_ops") for path in (REPOSITORY / folder).rglob("*.*")]
    text = "".join(path.read_text(encoding="utf-8") for path in sources if path.suffix in (".py", ".rs", ".cpp", ".h"))
    text += "\n".join(m.text for m in tool.messages())
    text = re.sub(r"\\\n\s*|\"\s*\n\s*f?\"|`", "", text)
    fragments = {part.strip(" :;,()") for literal in guide_literals() if " " in literal for part in literal.split("...")}
    assert not {part for part in fragments if part not in text}


def test_the_page_of_argument_errors_names_arguments_values_and_places():
    texts = {(m.path, m.text) for m in tool.messages()}
    # a literal, a constant in a literal, a parameter that callers fill, a loop over names, a name that Python assigns before
    assert ("src/problem/scores.rs", "softmax_scale: got …, expected a finite float32 number") in texts
    assert ("src/problem/operands.rs", "q or v_cache or v: got headdim …, expected a headdim from 1 to 512") in texts
    assert ("src/problem/scores.rs", "window_left or window_right: got …, expected -1 (no bound) or a number of keys >= 0") in texts
    mesh = "volta_fa.distributed.…: mesh: got … dimensions, expected 1 (a ring) or 2 (ring, Ulysses)"
    assert ("python/volta_fa/distributed/groups.py", mesh) in texts
    assert "| `softmax_scale` | … | a finite float32 number |" in tool.page()


def test_every_call_that_makes_an_error_is_collected():
    """A check of the scanner of Rust: as many places as a plain search finds."""
    for path in (REPOSITORY / "src").rglob("*.rs"):
        name = str(path.relative_to(REPOSITORY))
        source = tool._sources("src", (".rs",))[name]
        lines = {source.count("\n", 0, call.start()) + 1 for call in re.finditer(r"Error::value\(", source)}
        assert lines <= {m.line for m in tool.messages() if m.path == name}, name
