"""Tests of the documentation's pages: their code blocks run, and their addresses (URLs) come from one place.

The line before each block of Python or shell says whether a test runs it, in a comment that readers do not see: `<!-- run -->`,
`<!-- run: torch 2.11 -->` (with that release or a newer one) or `<!-- not run: reason -->`. The Python blocks of a page run in order as one
program, on the CPU, after the page's lines in SETUP. Each address is another project's or comes from python/volta_fa/addresses.json, which
tools/addresses.py writes into pages."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import addresses
import volta_fa.diagnostics
from conftest import NEEDS_COMPILER, REPOSITORY, need
from processes import output_of, run_forked

FENCE = re.compile(r"^ *```(?:python|sh)$", re.M)
#: A block with its comment. Groups: indentation, "run" or none, major and minor release of torch, language, code.
MARKED = re.compile(r"^( *)<!-- (?:(run)(?:: torch (\d+)\.(\d+))?|not run: [^>\n]+) -->\n\1```(python|sh)\n(.*?)^\1```$", re.M | re.S)
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
WITH_BLOCKS = [*PAGES, REPOSITORY / "CONTRIBUTING.md", REPOSITORY / "tools" / "volta-sim" / "README.md"]
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

_ATTENTION = """
import torch, volta_fa
q, k, v = (torch.randn(2, 64, 2, 64, dtype=torch.float16) for _ in range(3))
"""
_CACHE = """
import torch, volta_fa
batch = 2
q = torch.randn(batch, 4, 32, 128, dtype=torch.float16)
k, v = torch.randn(2, batch, 4, 8, 128, dtype=torch.float16)
pages = torch.arange(16, dtype=torch.int32).view(batch, 8)
lengths = torch.tensor([90, 70], dtype=torch.int32)
"""
_MODEL = """
import torch
import volta_fa.transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
size = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
name = "model"
LlamaForCausalLM(LlamaConfig(**size, attn_implementation="volta_fa")).save_pretrained(name)
model = LlamaForCausalLM.from_pretrained(name, attn_implementation="volta_fa")
inputs = {"input_ids": torch.tensor([[3, 4, 5, 6]])}
"""
_GROUP = """
import torch.distributed
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
group = mesh = torch.distributed.group.WORLD
"""
#: What a page's code takes from its reader: inputs, models and process groups.
SETUP = {
    "docs/guides/context-parallel.md": _ATTENTION + _GROUP + "tokens = labels = positions = torch.arange(64).view(2, 32)\n",
    "docs/guides/fast.md": _ATTENTION,
    "docs/guides/flash-attn.md": _ATTENTION,
    "docs/guides/flex.md": "import torch\nquery, key, value = (torch.randn(1, heads, 4096, 64) for heads in (4, 2, 2))\n",
    "docs/guides/integrations.md": "import torch\nq, k, v = torch.randn(3, 20, 2, 64)\nmax_q = max_k = 12\n"
    "cu_seqlens_q = cu_seqlens_k = torch.tensor([0, 8, 20], dtype=torch.int32)\n",
    "docs/guides/kv-cache.md": _CACHE + "blocks = torch.tensor([0, -1], dtype=torch.int32).expand(batch, 4, 1, 2)\n"
    "shared_pages, shared_seqlen = torch.arange(20, 24, dtype=torch.int32), 64\nown_pages, own_lengths = pages, lengths\n",
    "docs/guides/mla.md": _CACHE + "q, latent_cache = torch.randn(batch, 1, 16, 576), torch.randn(16, 16, 1, 576)\n",
    "docs/guides/quantized-kv-cache.md": _CACHE + _MODEL,
    "docs/guides/transformers.md": _MODEL + _GROUP + "input_ids = labels = position_ids = torch.arange(8).view(1, 8)\ncount = 8\n",
    "tools/volta-sim/README.md": "import os\nos.environ['VOLTA_FA_SIMULATE'] = 'timing'\n",
}


def name_of(page):
    return str(page.relative_to(REPOSITORY))


def blocks(page, language):
    """Returns the blocks of a page to run with this torch."""
    return [
        textwrap.dedent(text)
        for _, run, *release, kind, text in MARKED.findall(page.read_text())
        if run and kind == language and tuple(int(number or 0) for number in release) <= TORCH
    ]


def on_the_cpu(block):
    """Returns a block in which tensors and volta_fa's switches (`enable_sdpa()`) use the CPU instead of CUDA."""
    return re.sub(r"\b(enable_\w+|sdpa_enabled)\(\)", r'\1("cpu")', block.replace('device="cuda"', 'device="cpu"'))


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=name_of)
def test_every_block_says_whether_it_runs(page):
    text = page.read_text()
    assert len(FENCE.findall(text)) == len(MARKED.findall(text))


def test_every_setup_belongs_to_a_page_with_blocks():
    assert {name_of(page) for page in WITH_BLOCKS if blocks(page, "python")} >= SETUP.keys()
    assert any(blocks(page, "sh") for page in WITH_BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in WITH_BLOCKS if blocks(page, "python")], ids=name_of)
def test_the_programs_of_a_page_run(page, tmp_path):
    setup = SETUP.get(name_of(page), "")
    if "transformers" in setup:
        pytest.importorskip("transformers")
    if "SIMULATE" in setup:
        need("sim")  # else skips
    # ends at once: gloo's threads may outlive the interpreter
    program = "\n".join([setup, *map(on_the_cpu, blocks(page, "python")), "import os, sys", "sys.stdout.flush(), os._exit(0)"])
    (tmp_path / "program.py").write_text(program)
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY / "python"), "CUDA_VISIBLE_DEVICES": ""}
    output_of(run_forked([str(tmp_path / "program.py")], env, cwd=str(tmp_path)))


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("page", [page for page in WITH_BLOCKS if blocks(page, "sh")], ids=name_of)
def test_the_commands_of_a_page_run(page, tmp_path):
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY / "python"), "PATH": path}
    for block in blocks(page, "sh"):
        output_of(subprocess.run(["bash", "-euc", block], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600))


#: Addresses of other projects that pages, forms and the notebook may name.
OTHERS = ("https://download.pytorch.org/whl/", "https://sh.rustup.rs", "https://github.com/vllm-project/", "https://github.com/1CatAI/")
URL = re.compile(r"\b(?:https?|git|ssh)://[^\s)>\"'`\\]+|\bgit@[\w.]+:[^\s)>\"'`\\]+")
NAMED = [
    *PAGES,
    *(REPOSITORY / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "pyproject.toml", "CITATION.cff")),
    *sorted((REPOSITORY / ".github").rglob("*.*")),
    *sorted((REPOSITORY / "packaging").iterdir()),
    *sorted((REPOSITORY / "integrations").rglob("*.md")),
    REPOSITORY / "examples" / "first_light.ipynb",
]


def unknown_addresses(text, own):
    """Returns the addresses in a text that are neither another project's nor in `own`, as addresses.json has them."""
    known = (*OTHERS, *(url.rstrip("/") for url in own.values() if url))
    return [url for url in URL.findall(text) if not url.startswith(known)]


@pytest.mark.parametrize("page", [page for page in NAMED if page.is_file()], ids=name_of)
def test_every_address_comes_from_one_place(page):
    assert unknown_addresses(page.read_text(), addresses.read()) == []


def test_unknown_addresses_are_found():
    known = {"release": "https://host/files/", "source": "git@host:volta_fa.git", "issues": ""}
    text = "<https://host/files/a.whl>, `git clone git@host:volta_fa.git`, [x](https://other/volta_fa/issues), git@other:volta_fa.git"
    assert unknown_addresses(text, known) == ["https://other/volta_fa/issues", "git@other:volta_fa.git"]


def test_pages_show_the_addresses_of_the_file():
    """What tools/addresses.py writes into pages is there: addresses.pages() returns each page's text by path."""
    assert all((REPOSITORY / path).read_text() == text for path, text in addresses.pages(addresses.read()).items())


def test_writing_and_removing_addresses(tmp_path, monkeypatch):
    """Written addresses appear in pages, forms and the check's last line. Removing them restores the texts without addresses."""
    files = [addresses.FILE, addresses.SECTION, addresses.FORMS]  # addresses.json, a page with a section of addresses, issue forms
    for path in files:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / path, tmp_path / path)
    none = dict.fromkeys(addresses.NAMES, "")
    known = {"release": "https://host/files/", "source": "https://host/volta_fa.git", "issues": "https://host/issues"}
    addresses.write(none, tmp_path)
    before = [(tmp_path / path).read_text() for path in files]
    assert addresses.write(known, tmp_path) == files
    install = (tmp_path / addresses.SECTION).read_text()
    shown = "<https://host/files/>", "https://host/files/first_light.ipynb", "git clone https://host/volta_fa.git", "<https://host/issues>"
    assert [text for text in shown if text not in install] == []
    assert "is published" not in install and "url: https://host/files/" in (tmp_path / addresses.FORMS).read_text()
    assert json.loads((tmp_path / addresses.FILE).read_text()) == known
    monkeypatch.setattr(volta_fa.diagnostics, "_ADDRESSES", tmp_path / addresses.FILE)
    assert volta_fa.diagnostics.send(Path("a.json")) == "Send a.json as an issue at https://host/issues"
    addresses.write(none, tmp_path)
    assert volta_fa.diagnostics.send(Path("a.json")) == "Send a.json to the person who gave you volta_fa"
    assert [(tmp_path / path).read_text() for path in files] == before
