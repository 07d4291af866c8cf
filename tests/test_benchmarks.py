"""The commands `python -m benchmarks.*` run on small shapes, and write figures that follow from their measurements.

Figures are measured on the CPU, or simulated (volta-sim, cycles of a V100 or Turing GPU). A benchmark (benchmarks.driver) has rows, which
are cases with a name, and writes JSON, a plot and a Markdown section. Simulated figures are lists by machine model (driver.MODELS): [0] of
the default model (its name is ""), [1] with a perfect instruction cache. `case.calls(device)` are a case's calls ("work": functions without
arguments), and `simulated(work, model, gpu)` returns a report of each launch. `need("sim")` skips a test without the simulator."""

import copy
import importlib
import json
import os
import re
import struct
import sys
import time
from argparse import Namespace

import pytest
import torch

import reference
from conftest import INFO, LIBRARY, REPOSITORY, need
from flash_attention import refused  # checks that a call raises this error, with a message of one line
from processes import output_of, run_forked

PNG = b"\x89PNG\r\n\x1a\n"
pytest.importorskip("matplotlib")
pytest.importorskip("rich")
if LIBRARY.parents[1].name != "volta_fa":
    pytest.skip("the benchmarks measure the package's library", allow_module_level=True)

sys.path.insert(0, str(REPOSITORY))
from benchmarks import block_mask, decode, docs, driver, long_sequences, models, pytorch_fmha, report, sparse, volta
from benchmarks.attention import Shape
from benchmarks.measure import simulated
from volta_fa import progress
from volta_fa.errors import CommandError


def run(module: str, *arguments: object) -> None:
    """Runs `python -m benchmarks.MODULE` in a process, as a user does."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VOLTA_FA_SIM")}
    printed = output_of(run_forked(["-m", *f"benchmarks.{module}".split(), *arguments], environment, cwd=REPOSITORY))
    assert f"benchmarks.{module}" in printed and torch.__version__ in printed


def main(module: str, *arguments: object) -> int:
    """Calls the main function of benchmarks.MODULE in this process. Returns its exit status. A second word of `module` is a subcommand."""
    module, *words = module.split()
    return importlib.import_module(f"benchmarks.{module}").main([*words, *map(str, arguments)])


def outputs(folder, name: str) -> list[object]:
    """Returns arguments that make a benchmark write JSON, a plot and a Markdown section."""
    return ["--json", folder / f"{name}.json", "--plot", folder / f"{name}.png", "--markdown", folder / f"{name}.md"]


def results(folder, name: str):
    """Checks that the files of `outputs` are there, and returns the JSON."""
    assert (folder / f"{name}.png").read_bytes().startswith(PNG)
    section = (folder / f"{name}.md").read_text()
    assert f"![{name}](images/{name}.png)" in section and "kind of figures" in section
    return json.loads((folder / f"{name}.json").read_text())


def test_table(tmp_path):
    """Six rows of `1,1,*` (16, 32 and 64 tokens, causal and not) and one of a shape of its own, with volta_fa and eager attention."""
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
        # forward has two products of matrices, backward five
        for what, share in (("forward", 1), ("backward", 2.5), ("total", 3.5)):
            assert ours["tflops"][what] == pytest.approx(share * flops / ours["ms"][what] / 1e9)


@pytest.mark.slow
def test_memory(tmp_path):
    run("memory", "--device", "cpu", "--seqlens", 1024, 2048, "--nheads", 1, *outputs(tmp_path, "memory"))
    found = {(p["implementation"], p["passes"], p["seqlen"]): p["bytes"] for p in results(tmp_path, "memory")["points"]}
    scores = 2048 * 2048 * 4  # bytes in fp32
    assert found["eager", "forward", 2048] >= 2 * scores  # the scores and their softmax at once
    # memory is linear in seqlen; both lengths are above 768 rows, from which on ATen's attention takes larger blocks
    assert found["volta_fa", "forward and backward", 2048] <= 2.1 * found["volta_fa", "forward and backward", 1024]


def test_volta(tmp_path):
    need("sim")
    run("volta", "--quick", *outputs(tmp_path, "volta"))
    rows = results(tmp_path, "volta")
    passes = {(row["row"]["case"]["direction"], row["row"]["case"]["shape"]["headdim"]) for row in rows}
    assert passes == {(p, d) for p in ("forward", "backward") for d in (64, 128)}
    variants = {(v["pass"], v["headdim"], v["registers"], v["shared_bytes"]) for v in INFO["variants"]}
    for row in rows:
        case, launch = row["row"]["case"], row["main"]  # the slowest launch
        # a perfect instruction cache slows nothing down, up to noise. 125 TFLOP/s is a V100's peak
        assert 0 < row["tflops"][0] <= row["tflops"][1] * 1.05 < 125 and launch["us"] == max(row["kernels"].values())
        # the figures are of the kernels that this library ships
        facts = (case["direction"].capitalize(), case["shape"]["headdim"], launch["registers"], launch["shared_bytes"])
        assert facts in variants
        assert launch["loop_bytes"] % 16 == 0 and launch["loop_bytes"] > 0  # an instruction has 16 bytes


@pytest.mark.slow
def test_models_resumes(tmp_path):
    """`--resume FILE` keeps figures in FILE, a line of JSON per row, and takes them from there. The test changes a kept figure."""
    need("sim")
    kept = tmp_path / "kept.jsonl"
    arguments = ("--gpu", "t4", "--only", "SDXL, 64x64 to text", "--resume", kept)
    run("models", *arguments, "--json", tmp_path / "first.json")
    [line] = map(json.loads, kept.read_text().splitlines())
    [found] = json.loads((tmp_path / "first.json").read_text())
    assert line["key"]["gpu"] == "t4" and found["us"][0] == sum(launch["us"] for launch in line["figures"][0]) > 0
    changed = [[launch | {"us": 12.5} for launch in model] for model in line["figures"]]
    kept.write_text(json.dumps(line | {"figures": changed}) + "\n")
    run("models", *arguments, "--json", tmp_path / "second.json")
    [row] = json.loads((tmp_path / "second.json").read_text())
    assert row["us"] == [12.5, 12.5] and len(kept.read_text().splitlines()) == 1
    run("models", "--gpu", "t4", "--only", "SDXL, 64x64", "--kept", "--resume", kept, "--json", tmp_path / "kept.json")
    assert [row["us"][0] for row in json.loads((tmp_path / "kept.json").read_text())] == [12.5]  # the other row is not simulated
    # a row whose kernel has changed (`code` is a hash of its machine code) is simulated again
    other = [launch | {"code": "0"} for launch in line["key"]["launches"]]
    kept.write_text(json.dumps({"key": line["key"] | {"launches": other}, "figures": changed}) + "\n")
    run("models", *arguments, "--json", tmp_path / "third.json")
    [row] = json.loads((tmp_path / "third.json").read_text())
    assert row["us"][0] == pytest.approx(found["us"][0], rel=0.01)  # addresses of tensors move it by a little


def test_kept_figures_depend_on_all_of_their_key(tmp_path):
    """`--resume FILE` reuses figures of a row (`driver.Kept`) only if its GPU and its kernels' launches are the same. Other files are an
    error at the start."""
    file = tmp_path / "kept.jsonl"
    driver.Kept(file).put({"gpu": "t4", "launches": ["a"]}, [1.0])
    assert driver.Kept(file).get({"gpu": "t4", "launches": ["a"]}) == [1.0]
    assert driver.Kept(file).get({"gpu": "t4", "launches": ["b"]}) is None
    file.write_text(json.dumps({"gpu": "t4", "name": "a row of an earlier version", "figures": [1.0]}) + "\n")
    refused(CommandError, "--resume: got .*kept.jsonl, which another version wrote", driver.Kept, file)

    for file in (tmp_path, tmp_path / "no folder" / "kept.jsonl"):
        refused(CommandError, f"--resume: got {file}, expected a file to read and write", driver.Kept, file)


def test_long_sequences(tmp_path):
    """L2 misses of K and V slow long sequences down. The figures are simulated with the data rate that remains."""
    need("sim")
    # K and V of a head of 128 take 512 bytes a token: L2 holds 12,288 tokens of them, or 24,576 at headdim 64
    assert [long_sequences.miss_share(n, 128) for n in (4096, 12288, 16384, 65536)] == [0, 0, 0.25, 0.8125]
    assert long_sequences.miss_share(32768, 64) == 0.25 and long_sequences.machine(0) == ""
    # bytes per cycle and SM: the L2 rate of 17.6, which a quarter of misses still allows; with misses alone the DRAM rate of 6.4
    assert long_sequences.machine(0.25).endswith("=17.600") and long_sequences.machine(1).endswith("=6.400")
    target = tmp_path / "long.json"
    run("tables long_sequences", "--headdims", "64", "--lengths", "65536", "--shares", "0", "--keys", "128", "--json", target)
    slow, fast = json.loads(target.read_text())
    # L2 holds 24,576 of the 65,536 tokens
    assert "62% misses" in slow["row"]["name"] and 0 < slow["tflops"][0] < fast["tflops"][0] < 125


def test_cubins_of_a_fat_binary(tmp_path):
    """Finds the machine code of one architecture in a library's fat binary, and rejects the library of another torch release."""
    # a fat binary: magic, version 1, bytes of this header and of the entries. An entry's header: kind 2 (cubin), version, its own size
    # of 64, size of the content, and the architecture at byte 28
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
    for gpu, torch_version in (("v100", "2.7.1"), ("titanrtx", "2.11.0")):
        refused(CommandError, f"expected that of torch {torch_version}", main, "pytorch_fmha", gpu, library, tmp_path / "volta-sim")
    for gpu, torch_version in (("v100", "2.7.1"), ("t4", "2.11.0")):
        arguments = ("--gpu", gpu, "--pytorch", library, "volta-sim", "--only", "SDXL, 64x64 to text")
        refused(CommandError, f"expected that of torch {torch_version}", main, "models", *arguments)


def test_the_clock_rates_of_gpus_are_the_simulators():
    need("sim")
    for name, gpu in driver.GPUS.items():
        (work,) = volta.Case(volta.FORWARD, Shape(batch=1, nheads=1, seqlen_q=64, seqlen_k=64, headdim=64)).calls("cpu")
        timing = simulated(work, "", name)[0]["timing"]
        assert timing["kernel_us"] == pytest.approx(timing["kernel_cycles"] / gpu.ghz / 1e3)


def test_a_timed_block_combines_partial_results():
    """Many blocks share a row tile. The last of them alone computes softmax_lse, by a logarithm."""
    need("sim")
    for case in (decode.Case(128, lengths=(2048,), group=4, kv_heads=8), sparse.SparseCase(queries=1, heads=8, headdim=512, topk=448)):
        (work,) = case.calls("cpu")
        assert "MUFU.LG2" in simulated(work, "", "v100")[-1]["timing"]["mix"]


def test_a_row_counts_every_kernel_of_the_pass():
    """The backward pass has three: preprocess, main and postprocess."""
    need("sim")
    row = next(driver.Row(str(c), c) for c in volta.quick_cases() if c.direction == volta.BACKWARD)
    result = driver.Result(row, driver.simulate(row.call), driver.GPUS["v100"].peak_tflops)
    times = [launch["us"] for launch in result.launches[0]]
    assert len(times) == 3 and result.main["us"] == max(times)
    assert result.tflops() == pytest.approx(row.case.shape.backward_flops / sum(times) / 1e6)
    assert os.environ.get("VOLTA_FA_SIMULATE") is None


@pytest.mark.skipif(not hasattr(torch.ops.volta_fa, "_plan"), reason="this library cannot describe its plans")
def test_plan(capsys):
    """Each shape's kernels are listed in the order of their launches, and exist; without shapes the command uses its own."""
    main("plan", "--json", "2,8,300,500,72,causal", "1,32,2048,2048,128")
    names = {v["name"] for v in INFO["variants"]}
    for shape in json.loads(capsys.readouterr().out):
        assert [k["role"] for k in shape["kernels"]] == ["forward", "backward, preprocess", "backward, main", "backward, postprocess"]
        for kernel in shape["kernels"]:
            assert kernel["name"] in names and kernel["headdim"] >= shape["headdim"]
            assert kernel["grid"][2] == shape["batch"]
    assert main("plan", "--device", "t4") == 0 and "sm_75, 40 SMs" in capsys.readouterr().out


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
        ("tables features", ["--shapes", "1,4,8,8"], "1,4,8,8"),
        ("decode", ["--prefill", "--tokens", "511"], "--tokens 511"),
        ("pytorch_fmha", ["titanrtx", "library", "volta-sim", "--lengths", "4096", "1000"], "--lengths"),
    ],
)
def test_wrong_arguments(module, arguments, named):
    """The error has one line, which names the argument."""
    refused(CommandError, re.escape(named), main, module, *arguments)


def test_decode_sweep(tmp_path):
    """Figures of decoding by page size and by rows: the Markdown section has those of the JSON."""
    need("sim")
    small = ["--headdims", "64", "--tokens", "128", "--sweeps", "page", "rows"]
    assert main("decode", "--sweep", *small, *outputs(tmp_path, "decode_sweep")) == 0
    found = results(tmp_path, "decode_sweep")
    assert [p["row"]["name"] for p in found] == [f"{s} {n}, headdim 64" for s in ("page", "rows") for n in decode.SWEEPS[s][0]]
    assert all(0 < p["share"][0] < 1 and p["gb_s"][0] > 0 for p in found)
    # the tables have what the JSON has
    section = (tmp_path / "decode_sweep.md").read_text()
    cells = [f"{p['us'][0]:.1f}, {p['gb_s'][0]:.0f}, {p['share'][0]:.0%}" for p in found]
    assert all(cell in section for cell in cells) and "Published by others" in section
    assert section in docs.fill(docs.PAGE.read_text(), "decode_sweep", section)


def test_prefill(tmp_path):
    """Figures for a dense cache (page 0) and pages of 16, 64 and 256 tokens. A causal prompt of n tokens, 40 heads and headdim 64 has
    4 * 64 * 40 * n^2 / 2 operations."""
    need("sim")
    figures = tmp_path / "prefill.json"
    main("decode", "--prefill", "--tokens", "512", "--only", "headdim 64", "--json", figures, "--markdown", tmp_path / "prefill.md")
    found = json.loads(figures.read_text())
    assert [row["row"]["case"]["page"] for row in found] == [0, 16, 64, 256]
    assert found[0]["tflops"][0] == pytest.approx(4 * 64 * 40 * (512 * 512 / 2) / found[0]["us"][0] / 1e6)
    section = (tmp_path / "prefill.md").read_text()
    assert all(f"| {found[0]['us'][0] / row['us'][0]:.0%}" in section for row in found)


@pytest.mark.parametrize(("limit", "status"), [(1e6, 1), (1.0, 0)])
def test_a_missed_target_fails_a_strict_benchmark(limit, status, capsys):
    need("sim")
    row = driver.Row("forward", volta.quick_cases()[0], models=("",), target=limit)
    grids = lambda found, _: [report.table("speeds", found, {"row": lambda r: r.row.name + r.missed()})]  # noqa: E731
    # a target is in TFLOP/s, and a strict benchmark's exit status tells whether a row misses its own
    assert driver.run("volta", driver.Benchmark("", lambda _: [row], grids, strict=True), []) == status
    assert ("1 figures below their targets" in capsys.readouterr().out) == bool(status)


def test_models(tmp_path):
    """SDXL's cross attention: batch 2, 10 heads, 4096 queries, 77 keys, headdim 64."""
    need("sim")
    assert main("models", "--only", "SDXL, 64x64 to text", *outputs(tmp_path, "models")) == 0
    (found,) = results(tmp_path, "models")
    assert found["tflops"][0] == pytest.approx(4 * 2 * 10 * 4096 * 77 * 64 / found["us"][0] / 1e6) and 0 < found["share"][0] < 1
    refused(CommandError, "--only: got nothing", main, "models", "--only", "nothing")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "window"), [(7, 7, 0), (7, 7, 3), (3, 9, 0), (3, 9, 4), (9, 5, 2)])
def test_models_count_the_pairs_of_the_mask(causal, seqlen_q, seqlen_k, window):
    attention = models.Attention(nheads=1, nheads_k=1, headdim=64, causal=causal, window=window)
    case = models.Case(attention, 1, seqlen_q, seqlen_k, backward=False)
    bound = window or -1  # window 0 and bound -1: all keys
    assert case.visible_pairs() == reference.tolerance.visible(seqlen_q, seqlen_k, causal, bound, bound).sum()


def test_models_have_a_row_for_all_gpus(tmp_path):
    """Waves have another number of heads on each GPU. Turing has no kernels for latents."""
    options = Namespace(gpu=["v100", "rtx2080ti"], store=driver.Kept(tmp_path / "kept"), pytorch=None)
    launch = {"us": 1e3, "call": 0, "kernel": "k"}
    found = [driver.Result(row, [[launch], [launch]], 1e3) for row in models.rows(options)]
    (grid,) = models.grids(found, options)
    # after the name, four cells for each GPU: microseconds, rates, share of the peak, PyTorch's TFLOP/s
    rows = {row[0]: row[1:] for row in grid.rows}
    assert len(rows) == len(list(models.model_rows("v100"))) and len(grid.columns) == 9
    (wave,) = (cells for name, cells in rows.items() if "a wave of 480p" in name)
    assert wave[0] == wave[4] == "1000" and wave[1] != wave[5]
    assert rows["DeepSeek V2 Lite, decode: 8 x 1x4096, heads 16/1, headdim 576/512"][4:] == ["-"] * 4
    assert wave[3] == "-"  # no figure of PyTorch's is kept
    row = next(row for row in models.model_rows("rtx2080ti") if row.wave)
    options.pytorch["rtx2080ti"].tflops = lambda of: 2.0 if str(of) == str(row) else None
    cells = next(cells for name, *cells in models.grids(found, options)[0].rows if name == str(row))
    assert cells[3] == "-" and cells[7].startswith("2.0 (")


def test_docs(tmp_path):
    """`docs FOLDER` puts each section and plot of the folder into the page, between the comments with its name."""
    page, folder = tmp_path / "page.md", tmp_path / "results"
    page.write_text("before\n<!-- begin a -->\nold\n<!-- end a -->\n<!-- begin b -->\nkept\n<!-- end b -->\nafter\n")
    folder.mkdir()
    (folder / "a.md").write_text("new \\1\n")
    (folder / "a.png").write_bytes(PNG)
    main("docs", folder, "--page", page)
    assert page.read_text() == "before\n<!-- begin a -->\nnew \\1\n<!-- end a -->\n<!-- begin b -->\nkept\n<!-- end b -->\nafter\n"
    assert (tmp_path / "images" / "a.png").read_bytes() == PNG
    (folder / "c.md").write_text("no such section")
    refused(CommandError, "begin c", main, "docs", folder, "--page", page)


def test_kv_perplexity(monkeypatch, capsys):
    """Perplexity with quantized KV caches, of a random model with one large key channel: rotation of keys reduces the loss."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from benchmarks import kv_perplexity

    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    kv_perplexity.register()
    both = {}
    for name in ("eager", "kv_perplexity"):
        torch.manual_seed(0)
        both[name] = transformers.LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation=name).eval()
        for parameter in both[name].parameters():
            parameter.data.mul_(5 if parameter.dim() > 1 else 1)
        for layer in both[name].model.layers:
            layer.self_attn.k_proj.weight.data[3] *= 30
    tokens = torch.arange(64)[None] * 37 % 128
    with torch.no_grad():
        expected, found = (model(tokens, use_cache=False).logits for model in both.values())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)

    monkeypatch.setattr(kv_perplexity, "load", lambda: (both["kv_perplexity"], lambda text: {"input_ids": [ord(c) % 128 for c in text]}))
    assert main("kv_perplexity", "--windows", 2, "--seqlen", 64) == 0
    lines = capsys.readouterr().out.partition("2 windows")[2].splitlines()[1:]
    kl = {line.partition("perplexity")[0].strip(): float(line.rpartition("KL")[2]) for line in lines}
    assert list(kl)[:4] == ["exact", "fp16", "int8", "int8 rotated"] and len(kl) == 12
    # the loss of a cache is the Kullback-Leibler divergence (KL) of its predictions from those of the exact cache
    assert kl["exact"] == 0 <= kl["fp16"] < kl["int8 rotated"] < kl["int8"] < kl["int4"] and kl["int4 rotated"] < kl["int4"]


def test_block_mask_lists_are_valid_and_partial_cases_compare_with_full_ones():
    options, pairs = block_mask.options_of(block_mask.Mask("forward", density=0.25, partial=True, seqlen=1024), False)
    assert pairs == 8 * 2 * 128 * 128  # 8 blocks of 128 rows see 25%, two, of 8 blocks of 128 keys
    q = torch.randn(1, 1024, 1, 8)
    torch.ops.volta_fa.fwd(q, q, q, **options, check_lengths=True)
    masks = [block_mask.Mask("forward", density=1.0, partial=partial, seqlen=4096) for partial in (False, True)]
    cases = [block_mask.Case(mask, 64, 5) for mask in masks]  # headdim, heads
    # TFLOP/s of plain, of full and of partial blocks
    found = [
        driver.Result(driver.Row(str(i), case), [[{"us": case.flops / tflops / 1e6}]], 1.0)
        for i, (case, tflops) in enumerate(((block_mask.plain_of(cases[0]), 80.0), (cases[0], 60.0), (cases[1], 45.0)))
    ]
    assert block_mask.plain_of(cases[0]) == block_mask.plain_of(cases[1])
    assert [block_mask.ratio(result, found) for result in found[1:]] == [pytest.approx(0.75)] * 2
    assert block_mask.ratio(found[2], found[2:]) is None
    (grid,) = block_mask.grids(found, None)
    # the targets of block_mask.MASKS; speed and ratio
    assert [row[1:] for row in grid.rows] == [["0.93", "60.0, 0.75"], ["0.85", "45.0, 0.75"]]


def test_progress_in_a_pipe_is_lines_until_the_loop_ends(capfd, monkeypatch):
    """A loop that ends early, and `quiet`, print no more lines."""
    monkeypatch.setattr(progress.Lines, "interval", 0.05)
    for item in report.track(range(3), "rows"):
        time.sleep(0.12 if item == 2 else 0)
    said = capfd.readouterr().err.splitlines()
    assert len(said) > 1 and "rows: 2 of 3 done, " in said[0]
    for _ in report.track(range(3), "rows"):
        break
    with report.progress(quiet=True) as bar:
        bar.add_task("simulated V100", total=3)
        capfd.readouterr()
        time.sleep(0.2)
    assert capfd.readouterr().err == ""
