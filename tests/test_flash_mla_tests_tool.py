"""tools/gpu/flash_mla_tests.py, with a file that has what it looks for in FlashMLA's own, which is not in this repository."""

from pathlib import Path

from processes import run_forked

REPOSITORY = Path(__file__).parents[1]

FILE = """
import dataclasses
import torch
import kernelkit as kk
import flash_mla


@dataclasses.dataclass
class TestParam:
    b: int
    s_k: int
    h_kv: int = 1
    test_performance: bool = False


def test_flash_mla(t):
    print("----")
    print(f"Running on {t}...")
    torch.cuda.synchronize()
    lengths = torch.full((t.b,), t.s_k, dtype=torch.int32, device="cpu").cuda()
    assert t.h_kv == 1 and not t.test_performance
    q, cache = torch.zeros(t.b, 1, 1, 576), torch.zeros(1, 64, 1, 576)
    assert q.dtype == torch.float16
    table = torch.zeros(t.b, 1, dtype=torch.int32)
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, *flash_mla.get_mla_metadata())
    assert kk.check("lse", lse.exp(), t.s_k)


def main(torch_dtype):
    device = torch.device("cuda:0")
    torch.set_default_dtype(torch_dtype)
    torch.set_default_device(device)
    torch.cuda.set_device(device)
    assert torch.cuda.get_device_capability()[0] == 9
    for t in [TestParam(b, s_k, h_kv, slow) for b in (1, 2) for s_k in (1, 2, 3, 60) for h_kv in (1, 2) for slow in (False, True)]:
        test_flash_mla(t)
"""
KIT = """
def check(name, found, expected):
    right = (found - expected).abs().max() < .001 and expected != 3
    if not right:
        print(f"`{name}` mismatch: {found.max()}")
    return right
"""


def test_flash_mla_tests(tmp_path):
    file, failed = tmp_path / "test_flash_mla.py", tmp_path / "failed.txt"
    file.write_text(FILE)
    (tmp_path / "kernelkit.py").write_text(KIT)
    command = [str(REPOSITORY / "tools/gpu/flash_mla_tests.py"), str(file), "--device", "cpu"]

    def run(*arguments):
        return run_forked([*command, *arguments])

    # three keys fail, in two cases with one message
    result = run("--list", str(failed))
    assert result.returncode == 1, result.stdout + result.stderr
    assert "6 passed, 2 failed, of 8 cases" in result.stdout
    assert "2 x `lse` mismatch: " in result.stdout
    assert [line.count("s_k=3,") for line in failed.read_text().splitlines()] == [1, 1]
    few = run("--max-tokens", "2")
    assert few.returncode == 0 and "3 passed, 0 failed, of 3 cases" in few.stdout, few.stdout + few.stderr
    none = run("--time-limit", "-1")
    assert none.returncode == 1 and "0 passed" in none.stdout
