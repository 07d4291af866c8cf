//! The instructions of sm_75 that move and multiply matrices, on the prebuilt kernels of fixtures/turing.cu. Needs nvdisasm
//! (`$VOLTA_SIM_NVDISASM` or `PATH`).

use std::sync::OnceLock;
use volta_sim::{Extent, Launch, Machine, Module, Schedule, TimingOptions};

fn module() -> &'static Module {
    static MODULE: OnceLock<Module> = OnceLock::new();
    MODULE.get_or_init(|| {
        Module::load(include_bytes!("fixtures/turing.cubin"))
            .unwrap_or_else(|e| panic!("cannot load the test kernels: {e}\nthese tests need nvdisasm: set VOLTA_SIM_NVDISASM"))
    })
}

/// One block of one warp on these words; `out` words come back.
fn run_block(kernel: &str, threads: u32, inputs: [&[u32]; 3], out: usize) -> Result<Vec<u32>, String> {
    let mut result = vec![u32::MAX; out];
    let params: Vec<u8> = inputs.iter().map(|v| v.as_ptr() as u64).chain([result.as_mut_ptr() as u64]).flat_map(u64::to_le_bytes).collect();
    let mut extents: Vec<Extent> =
        inputs.iter().map(|v| Extent { name: "input", ptr: v.as_ptr().cast_mut().cast(), len: 4 * v.len(), read_only: true }).collect();
    extents.push(Extent { name: "out", ptr: result.as_mut_ptr().cast(), len: 4 * out, read_only: false });
    let launch = Launch { grid: [1, 1, 1], block: [threads, 1, 1], dynamic_smem: 0, params: &params, extents: &extents };
    // SAFETY: the extents live here.
    unsafe { module().run(kernel, &launch, &Schedule { quantum: 1, threads: 1 }) }.map_err(|e| e.to_string())?;
    Ok(result)
}

fn run(kernel: &str, inputs: [&[u32]; 3], out: usize) -> Vec<u32> {
    run_block(kernel, 32, inputs, out).unwrap()
}

/// A half of a small integer.
fn half(x: i32) -> u32 {
    let magnitude = x.unsigned_abs();
    if magnitude == 0 {
        return 0;
    }
    let exponent = 31 - magnitude.leading_zeros();
    ((x < 0) as u32) << 15 | (exponent + 15) << 10 | (magnitude << (10 - exponent) & 0x3ff)
}

/// Small integers that no symmetry hides.
fn number(seed: usize, i: usize, j: usize) -> i32 {
    ((seed * 31 + i * 17 + j * 7 + i * j * 5) % 23) as i32 - 11
}

/// Register `which` of a fragment: lane 4g+t has elements 2t and 2t+1 of row g, the next register of row g+8.
fn fragment(element: impl Fn(usize, usize) -> u32, which: usize) -> Vec<u32> {
    (0..32)
        .map(|l| {
            let (row, column) = (l / 4 + 8 * which, 2 * (l % 4));
            element(row, column) | element(row, column + 1) << 16
        })
        .collect()
}

#[test]
fn matrix_products() {
    let (a, b, c) = (|m, k| number(1, m, k), |k, n| number(2, k, n), |m, n| number(3, m, n));
    let product = |m: usize, n: usize| c(m, n) + (0..8).map(|k| a(m, k) * b(k, n)).sum::<i32>();
    let left = [fragment(|m, k| half(a(m, k)), 0), fragment(|m, k| half(a(m, k)), 1)].concat();
    let right = fragment(|n, k| half(b(k, n)), 0);
    // f32: c0 and c1 are columns 2t and 2t+1 of row g, c2 and c3 of row g+8
    let place = |i: usize, l: usize| (l / 4 + 8 * (i >> 1), 2 * (l % 4) + (i & 1));
    let sums: Vec<u32> = (0..128).map(|i| place(i / 32, i % 32)).map(|(m, n)| (c(m, n) as f32).to_bits()).collect();
    let found = run("hmma_f32", [&left, &right, &sums], 128);
    for (i, bits) in found.into_iter().enumerate() {
        let (m, n) = place(i / 32, i % 32);
        assert_eq!(f32::from_bits(bits), product(m, n) as f32, "row {m} column {n}");
    }
    let sums = [fragment(|m, n| half(c(m, n)), 0), fragment(|m, n| half(c(m, n)), 1)].concat();
    let expected = [fragment(|m, n| half(product(m, n)), 0), fragment(|m, n| half(product(m, n)), 1)].concat();
    assert_eq!(run("hmma_f16", [&left, &right, &sums], 64), expected);
}

#[test]
fn integer_matrix_products() {
    // all values of a byte, the extremes often
    let byte = |seed: usize, i: usize, j: usize| ((number(seed, i, j) * 12) as u8).wrapping_add((i * j) as u8);
    let c = |m, n| 1000 * number(3, m, n);
    let register = |seed: usize| -> Vec<u32> {
        (0..32).map(|l| u32::from_le_bytes(std::array::from_fn(|i| byte(seed, l / 4, 4 * (l % 4) + i)))).collect()
    };
    let place = |i: usize| (i % 32 / 4, 2 * (i % 4) + i / 32);
    let sums: Vec<u32> = (0..64).map(place).map(|(m, n)| c(m, n) as u32).collect();
    for (kernel, is_unsigned) in [("imma_s8", false), ("imma_u8", true)] {
        let a = |m, k| if is_unsigned { i32::from(byte(1, m, k)) } else { i32::from(byte(1, m, k) as i8) };
        let product = |m: usize, n: usize| (0..16).map(|k| a(m, k) * i32::from(byte(2, n, k) as i8)).sum::<i32>();
        let found = run(kernel, [&register(1), &register(2), &sums], 64);
        for (i, word) in found.into_iter().enumerate() {
            let (m, n) = place(i);
            assert_eq!(word as i32, c(m, n) + product(m, n), "{kernel}, row {m} column {n}");
        }
    }
}

#[test]
fn matrix_loads() {
    let memory: Vec<u32> = (0..512).map(|i| (2 * i) | (2 * i + 1) << 16).collect();
    // rows of 16 bytes anywhere, some of them the same
    let rows: Vec<usize> = (0..32).map(|l| (l * l * 3 + 5 * l) % 128).collect();
    let addresses: Vec<u32> = rows.iter().map(|&r| 16 * r as u32).collect();
    for (kernel, count, transposed) in
        [("ldsm_1", 1, false), ("ldsm_1t", 1, true), ("ldsm_2", 2, false), ("ldsm_2t", 2, true), ("ldsm_4", 4, false), ("ldsm_4t", 4, true)]
    {
        let found = run(kernel, [&memory, &addresses, &[]], 128);
        for matrix in 0..4 {
            let element = |row: usize, column: usize| (8 * rows[8 * matrix + row] + column) as u32;
            let expected = match (matrix < count, transposed) {
                (false, _) => vec![0; 32],
                (_, false) => fragment(element, 0),
                (_, true) => fragment(|column, row| element(row, column), 0),
            };
            assert_eq!(found[32 * matrix..32 * matrix + 32], expected, "{kernel}, matrix {matrix}");
        }
    }
}

#[test]
fn all_addresses_of_a_matrix_load_count() {
    let memory = vec![0; 512];
    let with = |lane: usize, address: u32| {
        let mut addresses = vec![0; 32];
        addresses[lane] = address;
        run_block("ldsm_1", 32, [&memory, &addresses, &[]], 128)
    };
    assert!(with(31, 2032).is_ok());
    let e = with(31, 2048).unwrap_err();
    assert!(e.contains("shared load out of bounds") && e.contains("LDSM") && e.contains("lane 31"), "{e}");
    let e = with(3, 8).unwrap_err();
    assert!(e.contains("misaligned load") && e.contains("lane 3"), "{e}");
}

#[test]
fn matrix_instructions_need_whole_warps() {
    let words = vec![0; 512];
    for (kernel, instruction) in [("ldsm_4", "LDSM"), ("movm", "MOVM"), ("hmma_f32", "HMMA"), ("hmma_f16", "HMMA"), ("imma_s8", "IMMA")] {
        let e = run_block(kernel, 31, [&words, &words, &words], 512).unwrap_err();
        assert!(e.contains(&format!("{instruction} with a partial warp (mask 0x7fffffff)")), "{e}");
    }
}

#[test]
fn transposition() {
    let element = |row: usize, column: usize| (8 * row + column) as u32;
    assert_eq!(run("movm", [&fragment(element, 0), &[], &[]], 32), fragment(|row, column| element(column, row), 0));
}

#[test]
fn special_functions() {
    let inputs: Vec<u32> = (0..32).map(|l| half(l - 16) | half(l / 4) << 16).collect();
    let found = run("special", [&inputs, &[], &[]], 96);
    for (l, words) in found.chunks(3).enumerate() {
        let power = |x: i32| match x {
            -14.. => ((x + 15) as u32) << 10,
            _ => 1 << (x + 24),
        };
        assert_eq!(words[..2], [power(l as i32 - 16), power(l as i32 - 16) | power(l as i32 / 4) << 16], "lane {l}");
    }
    let inputs: Vec<u32> = (0..32).map(|l| (l as f32 / 8.0 - 2.0).to_bits()).collect();
    for (x, words) in inputs.iter().zip(run("special", [&inputs, &[], &[]], 96).chunks(3)) {
        let (x, found) = (f32::from_bits(*x), f32::from_bits(words[2]));
        assert!((found - x.tanh()).abs() < 1e-6, "tanh of {x}: {found}");
    }
}

#[test]
fn timed_on_a_gpu_that_runs_it() {
    let (words, mut out) = (vec![0u32; 512], vec![0u32; 512]);
    let pointers = [words.as_ptr() as u64, words.as_ptr() as u64, words.as_ptr() as u64, out.as_mut_ptr() as u64];
    let params: Vec<u8> = pointers.into_iter().flat_map(u64::to_le_bytes).collect();
    let extents = [
        Extent { name: "words", ptr: words.as_ptr().cast_mut().cast(), len: 2048, read_only: true },
        Extent { name: "out", ptr: out.as_mut_ptr().cast(), len: 2048, read_only: false },
    ];
    let launch = Launch { grid: [1, 1, 1], block: [32, 1, 1], dynamic_smem: 0, params: &params, extents: &extents };
    let time = |name: &str| {
        let machine = Machine::named(name).unwrap();
        // SAFETY: the extents live here.
        unsafe { module().time("ldsm_4", &launch, &TimingOptions { machine, ..Default::default() }) }
    };
    let e = time("v100").unwrap_err().to_string();
    assert_eq!(e, "the cubin is for sm_75, a v100 runs sm_70");
    let report = time("t4").unwrap();
    assert_eq!(report.timing.mix["LDSM.4"], 1);
    assert!((1_000..10_000).contains(&report.timing.cycles), "{} cycles", report.timing.cycles);
    assert_eq!(Machine::names(), ["v100", "pg503", "t4", "rtx2080ti", "titanrtx"]);
    assert!(Machine::named("t5").is_none());
}
