//! Tests of the kernels' machine code that the library embeds (cubins: ELF files) against the tables of kernels: size of the parameters,
//! registers, spills, occupancy. A `Variant` is a kernel's row in the tables; `image(v)` is its code with ptxas's counts. A family is the
//! kernels of one architecture: volta (sm_70), turing (sm_75).

use volta_fa::kernels::{self, Pass, Variant};
use volta_fa::params::Divisor;

/// Offset of parameters in constant bank 0 for compute capability 7.x, after the driver's own data.
const PARAMETERS: usize = 0x160;

/// Returns `sh_info` and `sh_size` of a section, None without it. Offsets in the ELF64 header: e_shoff 40, e_shentsize 58, e_shnum 60,
/// e_shstrndx 62. In a section header: sh_name 0, sh_offset 24, sh_size 32, sh_info 44.
fn section(cubin: &[u8], name: &str) -> Option<(u32, usize)> {
    let number = |at: usize, bytes: usize| cubin[at..at + bytes].iter().rev().fold(0usize, |n, &b| n << 8 | b as usize);
    let (table, entry, count, names) = (number(40, 8), number(58, 2), number(60, 2), number(62, 2));
    let names = number(table + names * entry + 24, 8);
    let has_name = |header: usize| cubin[names + number(header, 4)..].split(|&b| b == 0).next() == Some(name.as_bytes());
    let header = (0..count).map(|i| table + i * entry).find(|&header| has_name(header))?;
    Some((number(header + 44, 4) as u32, number(header + 32, 8)))
}

/// Returns [`section`] of a kernel: `nv.constant0` has its parameters, `text` its code.
fn sections_of(v: &Variant, kind: &str) -> (u32, usize) {
    let cubin = kernels::image(v).cubin().unwrap();
    section(&cubin, &format!(".{kind}.{}", v.name)).unwrap_or_else(|| panic!("{}: its cubin has no .{kind}", v.name))
}

/// Parameter blocks (structs in src/params, which the host passes) have the size that each kernel was compiled for.
#[test]
fn parameter_sizes_match_cubins() {
    for v in kernels::variants() {
        let (_, bytes) = sections_of(v, "nv.constant0");
        let block = v.params();
        assert_eq!(bytes - PARAMETERS, kernels::params_bytes(block), "{}: {}", v.name, block.name());
        assert!((1..=4096).contains(&kernels::params_bytes(block)), "{}: the constant bank has 4096 bytes for parameters", v.name);
    }
}

/// Kernels divide exactly by a [`Divisor`] of their parameters: `quotient` in csrc/decode/tile_scheduler.cuh.
#[test]
fn divisors_are_exact() {
    let quotient = |n: i32, d: &Divisor| ((n as u64 * u64::from(d.factor)) >> d.shift) as i32;
    for divisor in (1..=130).chain([1000, 1023, 1024, 1025, 65_535, 65_536, 1 << 30, i32::MAX - 1, i32::MAX]) {
        let d = Divisor::new(divisor);
        let multiples = [1, 2, 3, 1000, i32::MAX / divisor].map(|m: i32| m.saturating_mul(divisor));
        for n in multiples.into_iter().flat_map(|n| [n - 1, n, n.saturating_add(1)]).chain([0, i32::MAX]) {
            assert_eq!(quotient(n, &d), n / divisor, "{n} / {divisor}");
        }
    }
}

/// File with registers per thread, in the order of the tables. To update it, run
/// `VOLTA_FA_WRITE_GOLDEN=1 cargo test --release --test kernels registers`, and explain changed counts in the commit.
const REGISTERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/registers.txt");

#[test]
fn registers_match_golden_file() {
    let mut compiled = "# kernel, registers per thread: written and compared by tests/kernels.rs\n".to_string();
    for v in kernels::variants() {
        let registers = sections_of(v, "text").0 >> 24; // the top byte of a text section's sh_info
        assert_eq!(kernels::image(v).registers, registers, "{}: ptxas and the cubin", v.name);
        compiled += &format!("{} {registers}\n", v.name);
    }
    if std::env::var_os("VOLTA_FA_WRITE_GOLDEN").is_some() {
        std::fs::write(REGISTERS, &compiled).unwrap();
    }
    let golden = std::fs::read_to_string(REGISTERS).unwrap();
    let wrong: Vec<_> = compiled.lines().filter(|line| !golden.lines().any(|l| l == *line)).collect();
    assert!(wrong.is_empty(), "compiled, but not in {REGISTERS}:\n{}", wrong.join("\n"));
    assert_eq!(golden, compiled, "{REGISTERS} has other kernels or another order");
}

/// Limits of spills, in bytes per thread. Kernels of fp32 in full precision (`Split`: each number is a sum of two fp16 numbers) hold the
/// sums of one loop iteration (a tile of keys) beside those of all, so they may spill. An iteration loads far more than that.
#[test]
fn kernels_have_no_spills() {
    for v in kernels::variants() {
        let most = match v.pass {
            Pass::ForwardSplit | Pass::ForwardSplitStreamK => 32,
            Pass::BackwardSplitScores | Pass::BackwardSplitGradients => 112,
            // spilled around a loop over all keys that few calls enter (largest_product in csrc/shared/cast/cast.cuh)
            Pass::Cast => 80,
            _ => 0,
        };
        assert!(kernels::image(v).spill_bytes <= most, "{}: ptxas spilled {} bytes", v.name, kernels::image(v).spill_bytes);
    }
}

/// Newer GPUs run the PTX, so it must name the virtual architecture of the family.
#[test]
fn ptx_targets_its_family() {
    for v in kernels::variants() {
        let ptx = kernels::image(v).ptx().unwrap();
        assert_eq!(ptx.last(), Some(&0), "{}", v.name);
        let text = String::from_utf8_lossy(&ptx);
        assert!(text.contains(&format!(".target sm_{}", v.family.sm)) && text.contains(v.name), "{}", v.name);
    }
}

/// The machine code as the simulator decodes it.
#[cfg(feature = "sim")]
mod decoded {
    use std::num::NonZero;
    use std::thread::{available_parallelism, scope};
    use volta_fa::kernels::{self, Variant};
    use volta_sim::{Machine, Module};

    /// Checks that the simulator decodes every instruction. Kernels have no arrays in local memory, and no shared memory beyond what the
    /// table counts.
    fn check_decoded(v: &Variant) {
        let module = Module::load(&kernels::image(v).cubin().unwrap()).unwrap_or_else(|e| panic!("{}: {e}", v.name));
        let info = module.kernel_info(v.name).unwrap();
        assert!(info.undecoded.is_empty(), "{}:\n{}", v.name, info.undecoded.join("\n"));
        // `kernels_have_no_spills` bounds what ptxas may spill. Arrays in local memory are no spills.
        let spills = kernels::image(v).spill_bytes > 0;
        assert!(spills || info.spill_insts == 0, "{}: {} local-memory instructions", v.name, info.spill_insts);
        assert_eq!(info.static_smem, 0, "{}: static shared memory, which the table does not count", v.name);
    }

    #[test]
    fn simulator_knows_every_instruction() {
        let known = &kernels::variants().filter(|v| Machine::of_sm(v.family.sm).is_some()).collect::<Vec<_>>();
        let threads = available_parallelism().map_or(1, NonZero::get);
        scope(|scope| {
            for first in 0..threads {
                scope.spawn(move || known.iter().skip(first).step_by(threads).for_each(|v| check_decoded(v)));
            }
        });
    }

    /// Machine descriptions and family tables agree about the hardware.
    #[test]
    fn machine_descriptions_match_families() {
        for name in Machine::names() {
            let machine = Machine::named(&name).unwrap();
            let family = kernels::COMPILED.families().find(|f| f.sm == machine.sm).unwrap();
            assert_eq!((machine.smem_per_sm, 32 * machine.max_warps), (family.shared_bytes, family.threads), "{name}");
            for v in kernels::variants().filter(|v| v.family.sm == machine.sm) {
                let resident = machine.occupancy(kernels::image(v).registers, v.shared_bytes, v.threads).ctas;
                assert!(resident >= v.blocks_per_sm, "{}: {resident} blocks on a {name}, {} in its table", v.name, v.blocks_per_sm);
            }
        }
    }
}
