"""The benchmark commands run, and say what they should: `python -m benchmarks.*` on small shapes."""

from __future__ import annotations

import copy
import importlib
import json
import os
import struct
import sys
import time

import pytest
import torch

from conftest import INFO, LIBRARY, REPOSITORY, need
from processes import run_forked

PNG = b"\x89PNG\r\n\x1a\n"
VOLTA_FIELDS = {
    "pass": str,
    "headdim": int,
    "headdim_v": int,
    "seqlen_q": int,
    "seqlen_k": int,
    "nheads": int,
    "nheads_k": int,
    "batch": int,
    "causal": bool,
    "heads_first": bool,
    "feature": str,
    "tflops": float,
    "tflops_no_icache": float,
    "registers": int,
    "shared_bytes": int,
    "spill_instructions": int,
    "excess_wavefront_fraction": float,
    "loop_bytes": int,
    "pipes": dict,
    "waits": dict,
    "balance": float,
}

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
if LIBRARY.parents[1].name != "volta_fa":
    pytest.skip("the benchmarks measure the package's library", allow_module_level=True)


sys.path.insert(0, str(REPOSITORY))
from benchmarks import report, volta
from benchmarks.published_results import PUBLISHED_RESULTS
from benchmarks.shapes import Shape
from volta_fa.errors import CommandError


def run(module: str, *arguments: object) -> None:
    """The command as a user starts it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VOLTA_FA_SIM")}
    done = run_forked(["-m", f"benchmarks.{module}", *arguments], environment, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"benchmarks.{module}" in done.stdout and torch.__version__ in done.stdout


def main(module: str, *arguments: object) -> int:
    """The same without a process of its own, for what takes no time."""
    return importlib.import_module(f"benchmarks.{module}").main([str(a) for a in arguments])


def outputs(folder, name: str) -> list[object]:
    return ["--json", folder / f"{name}.json", "--plot", folder / f"{name}.png", "--markdown", folder / f"{name}.md"]


def results(folder, name: str):
    assert (folder / f"{name}.png").read_bytes().startswith(PNG)
    section = (folder / f"{name}.md").read_text()
    assert f"![{name}](images/{name}.png)" in section and "kind of figures" in section
    return json.loads((folder / f"{name}.json").read_text())


def test_table(tmp_path):
    run("table", "--quick", "--device", "cpu", "--cases", "1,1,*", "1,2,33,47,24", *outputs(tmp_path, "table"))
    data = results(tmp_path, "table")
    assert data["header"]["kind of figures"] == "measured"
    assert len(data["rows"]) == 7
    for row in data["rows"]:
        ours, eager = row["results"]["volta_fa"], row["results"]["eager"]
        assert 0 < ours["errors"]["out"] < 1e-5 and 0 < eager["errors"]["out"] < 1e-5
        assert row["error_ratio_forward"] == pytest.approx(ours["errors"]["out"] / eager["errors"]["out"])
        assert 0 < row["error_ratio_backward"] < 4
        assert row["memory_saving"] == pytest.approx(1 - ours["peak_bytes"] / eager["peak_bytes"])
        assert ours["ms"]["total"] == pytest.approx(ours["ms"]["forward"] + ours["ms"]["backward"])
        pairs = row["seqlen_q"] * row["seqlen_k"] / (2 if row["causal"] else 1)
        flops = 4 * row["batch"] * row["nheads"] * pairs * row["headdim"]
        for what, share in (("forward", 1), ("backward", 2.5), ("total", 3.5)):
            assert ours["tflops"][what] == pytest.approx(share * flops / ours["ms"][what] / 1e9)


@pytest.mark.slow
def test_memory(tmp_path):
    run("memory", "--device", "cpu", "--seqlens", 1024, 2048, "--nheads", 1, *outputs(tmp_path, "memory"))
    found = {(p["implementation"], p["passes"], p["seqlen"]): p["bytes"] for p in results(tmp_path, "memory")["points"]}
    scores = 2048 * 2048 * 4  # bytes
    assert found["eager", "forward", 2048] >= 2 * scores  # the scores and their softmax at once
    # (ATen's attention takes larger blocks from 768 rows on)
    assert found["volta_fa", "forward and backward", 2048] <= 2.1 * found["volta_fa", "forward and backward", 1024]


def test_volta(tmp_path):
    need("sim")
    run("volta", "--quick", *outputs(tmp_path, "volta"))
    rows = results(tmp_path, "volta")
    assert {(row["pass"], row["headdim"]) for row in rows} == {(p, d) for p in ("forward", "backward") for d in (64, 128)}
    variants = {(v["pass"], v["headdim"], v["registers"], v["shared_bytes"]) for v in INFO["variants"]}
    for row in rows:
        assert {name: type(value) for name, value in row.items()} == VOLTA_FIELDS
        assert 0 < row["tflops"] <= row["tflops_no_icache"] * 1.05 < 125
        # the figures are of the kernels that this library ships
        assert (row["pass"].capitalize(), row["headdim"], row["registers"], row["shared_bytes"]) in variants
        assert row["loop_bytes"] % 16 == 0 and row["loop_bytes"] > 0


def test_volta_on_a_turing_card(tmp_path):
    need("sim")
    run("volta", "--quick", "--gpu", "rtx2080ti", "--cases", "forward", "D=64", *outputs(tmp_path, "volta"))
    [row] = results(tmp_path, "volta")
    assert 0 < row["tflops"] < volta.GPUS["rtx2080ti"].peak_tflops
    assert ("turing", row["registers"]) in {(v["family"], v["registers"]) for v in INFO["variants"]}


@pytest.mark.slow
def test_models_resumes(tmp_path):
    need("sim")
    kept = tmp_path / "kept.jsonl"
    arguments = ("--gpu", "t4", "--only", "SDXL, 64x64 to text", "--resume", kept)
    run("models", *arguments, "--json", tmp_path / "first.json")
    [line] = map(json.loads, kept.read_text().splitlines())
    assert line["gpu"] == "t4" and line["figures"]["us"] > 0
    kept.write_text(json.dumps(line | {"figures": line["figures"] | {"us": 12.5}}) + "\n")
    run("models", *arguments, "--json", tmp_path / "second.json")
    [row] = json.loads((tmp_path / "second.json").read_text())
    assert row["us"] == 12.5 and len(kept.read_text().splitlines()) == 1
    run("models", "--gpu", "t4", "--only", "SDXL, 64x64", "--kept", "--resume", kept, "--json", tmp_path / "kept.json")
    assert [row["us"] for row in json.loads((tmp_path / "kept.json").read_text())] == [12.5]  # the other row is not simulated
    # the row of another kernel is not taken
    other = [launch | {"code": "0"} for launch in line["launches"]]
    kept.write_text(json.dumps(line | {"launches": other, "figures": line["figures"] | {"us": 12.5}}) + "\n")
    run("models", *arguments, "--json", tmp_path / "third.json")
    [row] = json.loads((tmp_path / "third.json").read_text())
    assert row["us"] == pytest.approx(line["figures"]["us"], rel=0.01)  # addresses of tensors move it by a little


def test_long_sequences(tmp_path):
    need("sim")
    from benchmarks import long_sequences

    # K and V of a head of 128 take 512 bytes a token: L2 holds 12,288 tokens of them, or 24,576 at headdim 64
    assert [long_sequences.miss_share(n, 128) for n in (4096, 12288, 16384, 65536)] == [0, 0, 0.25, 0.8125]
    assert long_sequences.miss_share(32768, 64) == 0.25
    assert long_sequences.machine(0) == ""
    assert long_sequences.machine(0.25).endswith("=17.600") and long_sequences.machine(1).endswith("=6.400")
    target = tmp_path / "long.json"
    run("long_sequences", "--headdims", "64", "--lengths", "65536", "--shares", "0", "--keys", "128", "--json", target)
    slow, fast = json.loads(target.read_text())
    assert slow["share"] == 0.625 and 0 < slow["tflops"] < fast["tflops"] < 125


def test_cubins_of_a_fat_binary(tmp_path):
    from benchmarks import pytorch_fmha

    entries = b""
    for sm in (70, 75):
        content = f"cubin for {sm}".encode().ljust(16, b"\0")
        entry = bytearray(64)
        struct.pack_into("<HHIQ", entry, 0, 2, 0x101, 64, len(content))
        struct.pack_into("<I", entry, 28, sm)
        entries += entry + content
    library = tmp_path / "library.so"
    library.write_bytes(b"text" + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries + b"rest")
    assert [c.rstrip(b"\0") for c in pytorch_fmha.cubins(library, 75)] == [b"cubin for 75"]
    with pytest.raises(CommandError, match="expected that of torch 2.7.1"):
        main("pytorch_kernel", library, tmp_path / "volta-sim")
    with pytest.raises(CommandError, match="expected that of torch 2.11.0"):
        main("titan_rtx", library, tmp_path / "volta-sim")
    for gpu, torch_version in (("v100", "2.7.1"), ("t4", "2.11.0")):
        with pytest.raises(CommandError, match=f"expected that of torch {torch_version}"):
            main("models", "--gpu", gpu, "--pytorch", library, "volta-sim", "--only", "SDXL, 64x64 to text")


def test_the_gpus_are_those_of_the_simulator():
    need("sim")
    for name, gpu in volta.GPUS.items():
        case = volta.Case(volta.FORWARD, Shape(1, 1, 64, 64, 64, False))
        timing = volta._launch(case, name, "")[0]["timing"]
        assert timing["kernel_us"] == pytest.approx(timing["kernel_cycles"] / gpu.ghz / 1e3)


def test_volta_counts_every_kernel_of_the_pass():
    need("sim")
    case = next(c for c in volta.quick_cases() if c.direction == volta.BACKWARD)
    row = volta.simulate(case)
    assert len(row.kernel_us) == 3 and row.kernel == max(row.kernel_us, key=row.kernel_us.get)
    assert row.figures.tflops == pytest.approx(case.shape.backward_flops / sum(row.kernel_us.values()) / 1e6)
    assert os.environ.get("VOLTA_FA_SIMULATE") is None


def test_volta_cases_are_the_ones_that_were_promised():
    cases = volta.cases()
    assert len(cases) == len(set(cases))
    names = set(map(str, cases))
    for direction, heads in (("forward", 32), ("backward", 40)):
        for d in (64, 128):
            for rest in (f"N=2048 H={heads}", f"N=4096 H={heads} causal", "N=2048 H=32 on 8", f"N=2048 H={heads} (B,H,S,D) views"):
                assert f"{direction} D={d} {rest}" in names
            assert f"{direction} D={d} N=2047 H={heads}" in names and f"{direction} D={d} N=1111 H={heads}" in names
        for d in ("32", "96", "192", "192/128", "256"):
            assert f"{direction} D={d} N=1024 H={heads}" in names
        assert f"{direction} D=64 N=1024 H=16" in names and f"{direction} D=128 N=512 H=8" in names
    assert all(any(volta._same_case(c, p) for c in cases) for p in PUBLISHED_RESULTS if p.seqlen < 8192)


@pytest.mark.skipif(not hasattr(torch.ops.volta_fa, "_plan"), reason="this library cannot describe its plans")
def test_plan(capsys):
    main("plan", "--json", "2,8,300,500,72,causal", "1,32,2048,2048,128")
    names = {v["name"] for v in INFO["variants"]}
    for shape in json.loads(capsys.readouterr().out):
        assert [k["role"] for k in shape["kernels"]] == ["forward", "backward, prepare", "backward, main", "backward, finish"]
        for kernel in shape["kernels"]:
            assert kernel["name"] in names and kernel["headdim"] >= shape["headdim"]
            assert kernel["grid"][2] == shape["batch"]
    assert main("plan") == 0


@pytest.mark.parametrize(
    "module,arguments,named",
    [
        ("table", ["--cases", "1,2,3"], "`1,2,3`"),
        ("table", ["--cases", "7,*"], "7,*"),
        ("table", ["--device", "tpu"], "tpu"),
        ("table", ["--device", "cpu", "--max-seqlen", "3"], "--max-seqlen 3"),
        ("memory", ["--seqlens", "0"], "--seqlens"),
        ("volta", ["--cases", "sideways"], "sideways"),
        ("volta", ["--jobs", "0"], "--jobs 0"),
        ("plan", ["1,4,8,8,64", "--nheads-k", "3"], "--nheads-k 3"),
        ("plan", ["1,4,8,8,520"], "520"),
        ("features", ["--shapes", "1,4,8,8"], "1,4,8,8"),
        ("prefill", ["--tokens", "511"], "--tokens 511"),
        ("plan", ["1,4,8,8,64", "--capability", "7"], "--capability 7"),
    ],
)
def test_wrong_arguments(module, arguments, named):
    with pytest.raises(CommandError) as complaint:
        main(module, *arguments)
    assert named in str(complaint.value) and "\n" not in str(complaint.value)


def test_decode_sweep(tmp_path):
    need("sim")
    from benchmarks import decode_sweep, docs

    files = {kind: tmp_path / f"decode_sweep.{kind}" for kind in ("json", "plot", "markdown")}
    arguments = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    small = ["--headdims", "64", "--tokens", "128", "--sweeps", "page", "rows"]
    assert decode_sweep.main([*arguments, *small]) == 0
    found = json.loads(files["json"].read_text())["points"]
    assert [(p["sweep"], p["value"]) for p in found] == [(s, v) for s in ("page", "rows") for v in decode_sweep.SWEEPS[s][0]]
    assert all(0 < p["share"] < 1 and p["gb_s"] > 0 for p in found)
    # more rows take no less time, and the tables have what the JSON has
    section = files["markdown"].read_text()
    assert all(f"{p['us']:.1f}, {p['gb_s']:.0f}, {p['share']:.0%}" in section for p in found) and "Published by others" in section
    assert files["plot"].read_bytes().startswith(PNG)
    page = docs.PAGE
    assert section in docs.fill(page.read_text(), "decode_sweep", section)


def test_prefill(tmp_path, capsys):
    need("sim")
    from benchmarks import prefill

    figures = tmp_path / "prefill.json"
    prefill.main(["--tokens", "512", "--only", "headdim 64", "--json", str(figures)])
    found = json.loads(figures.read_text())
    assert [row["page"] for row in found] == [0, 16, 64, 256] and found[0]["share"] == 1
    assert all(row["share"] == pytest.approx(found[0]["us"] / row["us"]) for row in found)
    assert found[0]["tflops"] == pytest.approx(4 * 64 * 40 * (512 * 512 / 2) / found[0]["us"] / 1e6)
    assert capsys.readouterr().out.count("TFLOP/s") == 4


def test_models(tmp_path):
    need("sim")
    assert main("models", "--only", "SDXL, 64x64 to text", *outputs(tmp_path, "models")) == 0
    (found,) = results(tmp_path, "models")
    assert found["rate"] == pytest.approx(4 * 2 * 10 * 4096 * 77 * 64 / found["us"] / 1e6) and 0 < found["share"] < 1
    with pytest.raises(CommandError, match="--only: got nothing"):
        main("models", "--only", "nothing")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "window"), [(7, 7, 0), (7, 7, 3), (3, 9, 0), (3, 9, 4), (9, 5, 2)])
def test_models_count_the_pairs_of_the_mask(causal, seqlen_q, seqlen_k, window):
    from benchmarks.model_configs import FORWARD, Attention, Row
    from benchmarks.models import visible_pairs

    query, key = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if window:
        mask &= (key >= query - window) & (key <= query + window)
    if causal:
        mask &= key <= query
    row = Row("model", Attention(1, 1, 64, causal=causal, window=window), FORWARD, 1, seqlen_q, seqlen_k)
    assert visible_pairs(row) == mask.sum()


def test_models_share_figures():
    """Models with the same call have one key. A window that masks no key changes nothing."""
    need("sim")
    from benchmarks.model_configs import rows
    from benchmarks.models import _key

    keys = [_key(row, "v100")["call"] for row in rows(80) if row.model in ("Llama 3 8B", "Mistral 7B v0.1")]
    assert keys[0] == keys[3] and len(set(keys)) == 5


def test_waves_of_models():
    from benchmarks.model_configs import rows

    for gpu in volta.GPUS.values():
        waves = [row for row in rows(gpu.sms) if row.wave]
        blocks = [row.attention.nheads * row.seqlen_q // 128 for row in waves]
        assert len(waves) == 2 and all(n >= 80 and n % gpu.sms == 0 for n in blocks)


def test_headdim_512(tmp_path):
    """Takes figures of an earlier run, and says which are missing."""
    from benchmarks import headdim_512

    listed = list(headdim_512.rows())
    kept, section = tmp_path / "kept.jsonl", tmp_path / "headdim_512.md"
    kept.write_text("".join(json.dumps({"gpu": r.gpu, "name": r.name, "figures": [0.5, 0.75]}) + "\n" for r in listed[1:]))
    assert headdim_512.main(["--resume", str(kept), "--only", "nothing", "--markdown", str(section)]) == 0
    text = section.read_text()
    assert text.count("not simulated") == 1 and f"| {listed[0].name} | not simulated |" in text
    assert "50.0% / 75.0% of DRAM" in text and "0.5 / 0.8 (0.4%)" in text
    assert len(kept.read_text().splitlines()) == len(listed) - 1


def test_docs(tmp_path):
    page, folder = tmp_path / "page.md", tmp_path / "results"
    page.write_text("before\n<!-- begin a -->\nold\n<!-- end a -->\n<!-- begin b -->\nkept\n<!-- end b -->\nafter\n")
    folder.mkdir()
    (folder / "a.md").write_text("new \\1\n")
    (folder / "a.png").write_bytes(PNG)
    main("docs", folder, "--page", page)
    assert page.read_text() == "before\n<!-- begin a -->\nnew \\1\n<!-- end a -->\n<!-- begin b -->\nkept\n<!-- end b -->\nafter\n"
    assert (tmp_path / "images" / "a.png").read_bytes() == PNG
    (folder / "c.md").write_text("no such section")
    with pytest.raises(CommandError, match="begin c"):
        main("docs", folder, "--page", page)


def test_the_page_has_every_section():
    page = (REPOSITORY / "docs" / "reference" / "figures.md").read_text()
    for name in ("volta", "models", "t4", "rtx2080ti", "headdim_512", "decode_sweep", "gpu-table", "gpu-memory", "cpu-table", "cpu-memory"):
        assert page.count(f"<!-- begin {name} -->") == page.count(f"<!-- end {name} -->") == 1


def test_kv_perplexity(monkeypatch, capsys):
    """A random model, one of whose key channels is large: what is lost, and what a rotation gains."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from benchmarks import kv_perplexity

    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    kv_perplexity.register()
    models = {}
    for name in ("eager", "kv_perplexity"):
        torch.manual_seed(0)
        models[name] = transformers.LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation=name).eval()
        for parameter in models[name].parameters():
            parameter.data.mul_(5 if parameter.dim() > 1 else 1)
        for layer in models[name].model.layers:
            layer.self_attn.k_proj.weight.data[3] *= 30
    tokens = torch.arange(64)[None] * 37 % 128
    with torch.no_grad():
        expected, found = (model(tokens, use_cache=False).logits for model in models.values())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)

    monkeypatch.setattr(kv_perplexity, "load", lambda: (models["kv_perplexity"], lambda text: {"input_ids": [ord(c) % 128 for c in text]}))
    assert main("kv_perplexity", "--windows", 2, "--seqlen", 64) == 0
    lines = capsys.readouterr().out.partition("2 windows")[2].splitlines()[1:]
    kl = {line.partition("perplexity")[0].strip(): float(line.rpartition("KL")[2]) for line in lines}
    assert list(kl)[:4] == ["exact", "fp16", "int8", "int8 rotated"] and len(kl) == 10
    assert kl["exact"] == 0 <= kl["fp16"] < kl["int8 rotated"] < kl["int8"] < kl["int4"] and kl["int4 rotated"] < kl["int4"]


def test_block_mask_lists_are_valid_and_partial_cases_compare_with_full_ones():
    from benchmarks import block_mask

    options, pairs = block_mask.lists_of(1024, 0.25, True, torch.Generator().manual_seed(0))
    assert pairs == 8 * 2 * 128 * 128
    q = torch.randn(1, 1024, 1, 8)
    torch.ops.volta_fa.fwd(q, q, q, **options, check_lengths=True)
    assert [int(options["block_lists" + suffix][..., :2].sum()) for suffix in ("", "_t")] == [8 * 2 * 2] * 2
    full, partial = (block_mask.Case("forward", 1.0, partial, 4096, 0.9) for partial in (False, True))
    found = [block_mask.Row("v100", 64, case, "", "k", 1.0, tflops, 1.0, 80.0) for case, tflops in ((full, 60.0), (partial, 45.0))]
    assert [block_mask.ratio(row, found) for row in found] == [0.75, 0.75]
    assert block_mask.ratio(found[1], found[1:]) is None
    assert block_mask.grid_of(found).rows[1][1:] == ["0.90", "45.0, 0.75"]


def test_a_wait_shows_progress_in_a_pipe(capfd, monkeypatch):
    monkeypatch.setattr(report._Progress, "interval", 0.05)
    with report.progress() as bar:
        bar.add_task("simulated V100", total=3, completed=1)
        time.sleep(0.5)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) > 1 and all(line.startswith("simulated V100: 1 of 3 done, ") for line in lines if line.strip())
    with report.progress(quiet=True) as bar:
        bar.add_task("simulated V100", total=3)
        time.sleep(0.2)
    assert capfd.readouterr().err == ""


def test_track_yields_all_and_ends_with_its_reader(capfd, monkeypatch):
    monkeypatch.setattr(report._Progress, "interval", 0.05)
    for item in report.track(range(3), "rows"):
        time.sleep(0.12 if item == 2 else 0)
    assert "rows: 2 of 3 done, " in capfd.readouterr().err
    for _ in report.track(range(3), "rows"):
        break
    capfd.readouterr()
    time.sleep(0.2)
    assert capfd.readouterr().err == ""


#: Commands that end within ten seconds.
QUICK = {"docs", "overhead", "plan", "provenance"}
COMMANDS = {path.stem: text for path in (REPOSITORY / "benchmarks").glob("*.py") if "__main__" in (text := path.read_text())}


@pytest.mark.parametrize("module", sorted(COMMANDS.keys() - QUICK))
def test_every_long_command_shows_progress(module):
    assert "report.track(" in COMMANDS[module] or "report.progress(" in COMMANDS[module]
