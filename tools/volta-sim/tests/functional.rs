//! Tests what instructions compute against the same arithmetic in Rust, on prebuilt kernels: those of fixtures/functional.cu for sm_70 and
//! sm_75, with warps in lockstep and one after the other, and those of fixtures/turing.cu for what sm_75 adds (HMMA.1688, IMMA.8816, LDSM,
//! MOVM, MUFU of halves). A test has the arithmetic of the kernel that it runs, with the same constants. Needs nvdisasm
//! (`$VOLTA_SIM_NVDISASM` or `PATH`).

use std::sync::LazyLock;
use volta_sim::{Dispatch, Extent, Launch, Machine, Module, Schedule, TimingOptions};

static MODULES: LazyLock<[Module; 2]> = LazyLock::new(|| {
    [include_bytes!("fixtures/functional_sm70.cubin").as_slice(), include_bytes!("fixtures/functional_sm75.cubin")].map(load)
});
static TURING: LazyLock<Module> = LazyLock::new(|| load(include_bytes!("fixtures/turing.cubin")));

fn load(cubin: &[u8]) -> Module {
    Module::load(cubin).unwrap_or_else(|e| panic!("cannot load the test kernels: {e}\nthese tests need nvdisasm: set VOLTA_SIM_NVDISASM"))
}

/// Words of a, b and c, the kernels' inputs.
type Inputs<'a> = [&'a [u32]; 3];

/// Calls `f` with a launch of `blocks` blocks of `threads` threads on these words. An extent is memory that the kernel may access;
/// `exchanged` matters for times only.
fn launch<T>(blocks: u32, threads: u32, inputs: Inputs, out: &mut [u32], f: impl FnOnce(&Launch) -> T) -> T {
    let params: Vec<u8> = inputs.iter().map(|v| v.as_ptr() as u64).chain([out.as_mut_ptr() as u64]).flat_map(u64::to_le_bytes).collect();
    let mut extents: Vec<Extent> = inputs
        .iter()
        .map(|v| Extent { name: "input", ptr: v.as_ptr().cast_mut().cast(), len: 4 * v.len(), read_only: true, exchanged: false })
        .collect();
    extents.push(Extent { name: "out", ptr: out.as_mut_ptr().cast(), len: 4 * out.len(), read_only: false, exchanged: false });
    f(&Launch { grid: [blocks, 1, 1], block: [threads, 1, 1], dynamic_smem: 0, params: &params, extents: &extents })
}

/// Runs a kernel on one thread of the host. Returns the output, which starts as `out`, or the simulator's error. `quantum`: instructions
/// of a warp before the next one runs; with 20,000 each runs up to its barrier.
fn try_run(
    quantum: u32,
    module: &Module,
    kernel: &str,
    blocks: u32,
    threads: u32,
    inputs: Inputs,
    out: &[u32],
) -> Result<Vec<u32>, String> {
    let mut found = out.to_vec();
    // SAFETY: the extents live here.
    launch(blocks, threads, inputs, &mut found, |l| unsafe { module.run(kernel, l, &Schedule { quantum, threads: 1 }) })
        .map_err(|e| e.to_string())?;
    Ok(found)
}

/// Runs a kernel of one architecture in both warp orders. Returns what both compute. `out`: what the output holds before.
fn run_on(module: &Module, kernel: &str, blocks: u32, threads: u32, inputs: Inputs, out: &[u32]) -> Vec<u32> {
    let [first, second] = [1, 20_000].map(|quantum| try_run(quantum, module, kernel, blocks, threads, inputs, out).unwrap());
    assert_eq!(first, second, "{kernel}: the result depends on the warp order");
    first
}

/// Runs a kernel on both architectures. Returns what both compute: `out` words, which are 0 before.
fn run(kernel: &str, blocks: u32, threads: u32, inputs: Inputs, out: usize) -> Vec<u32> {
    let [volta, turing] = MODULES.each_ref().map(|m| run_on(m, kernel, blocks, threads, inputs, &vec![0; out]));
    assert_eq!(volta, turing, "{kernel}: sm_70 and sm_75 differ");
    volta
}

/// `n` words: 0, 1, all ones and the sign bit, without the first `seed % 5` of these, then pseudorandom ones.
fn words(n: usize, seed: u32) -> Vec<u32> {
    let mut state = seed;
    let random = std::iter::repeat_with(move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.rotate_left(16) ^ state
    });
    [0, 1, u32::MAX, 1 << 31].into_iter().chain(random).skip(seed as usize % 5).take(n).collect()
}

#[test]
fn integer_arithmetic_matches_rust() {
    let (a, b) = (words(256, 5), words(256, 6));
    let found = run("integers", 1, 256, [&a, &b, &[]], 256 * 20);
    for (t, (&x, &y)) in a.iter().zip(&b).enumerate() {
        let (sx, sy, n) = (x as i32, y as i32, t as u32 & 31);
        let both = (y as u64) << 32 | x as u64;
        let byte = |i: u32| (both >> (8 * i)) as u32 & 255;
        let expected = [
            x.count_ones(),
            y.leading_zeros(),
            if x == 0 { 0 } else { x.trailing_zeros() + 1 },
            y.reverse_bits(),
            byte(5) | byte(1) << 8 | byte(7) << 16 | byte(3) << 24,
            ((both << n) >> 32) as u32,
            (both >> n) as u32,
            sx.min(sy) as u32,
            x.max(y),
            sx.wrapping_abs() as u32,
            ((sx as i64 * sy as i64) >> 32) as u32,
            ((x as u64 * y as u64) >> 32) as u32,
            x / (y | 1),
            sx.wrapping_div((y >> 7 | 1) as i32) as u32,
            x % (y >> 20 | 1),
            (x & y) | (!x & (y >> 3)),
            x << (y & 31),
            (sx >> (y & 31)) as u32,
            (x > y) as u32 + 2 * (sx > sy) as u32 + 4 * (x == y) as u32,
            x.wrapping_mul(y).wrapping_sub(x),
        ];
        assert_eq!(found[20 * t..20 * t + 20], expected, "thread {t}: {x:#x}, {y:#x}");
    }
}

#[test]
fn arithmetic_of_64_bits_matches_rust() {
    let (a, mut b) = (words(256, 5), words(256, 11));
    // some divisors below 2^32
    b[1..80].iter_mut().step_by(2).for_each(|high| *high = 0);
    let long = |v: &[u32], t: usize| v[2 * t] as u64 | (v[2 * t + 1] as u64) << 32;
    let found = run("long_integers", 1, 128, [&a, &b, &[]], 128 * 16);
    for t in 0..128 {
        let (x, y, n) = (long(&a, t), long(&b, t), t as u32 & 63);
        let (sx, sy) = (x as i64, y as i64);
        let expected = [
            x.wrapping_add(y),
            x.wrapping_sub(y),
            x.wrapping_mul(y),
            sx.wrapping_div((y | 1) as i64) as u64,
            x % (y | 1),
            x << n,
            (sx >> n) as u64,
            (sx < sy) as u64 + 2 * (x < y) as u64 + 4 * (x == y) as u64,
        ];
        let found: Vec<u64> = (0..8).map(|i| long(&found, 8 * t + i)).collect();
        assert_eq!(found, expected, "thread {t}: {x:#x}, {y:#x}");
    }
}

#[test]
fn shuffles_scan_a_warp_and_exchange_within_segments() {
    let a = words(64, 3);
    let found = run("exchange", 1, 64, [&a, &[], &[]], 256);
    let scan: Vec<u32> = (0..64).map(|t| a[t & 32..=t].iter().fold(0, |s: u32, x| s.wrapping_add(*x))).collect();
    for t in 0..64 {
        let (warp, l) = (t & 32, t & 31);
        let down = if l % 8 + 5 < 8 { l + 5 } else { l };
        let expected = [scan[t], scan[warp + (l & 24) + t * 7 % 8], scan[warp + (l ^ 3)], scan[warp + down]];
        assert_eq!(found[4 * t..4 * t + 4], expected, "thread {t}");
    }
}

#[test]
fn threads_diverge_and_meet_again() {
    fn recursive(x: u32, k: u32) -> u32 {
        if k > 0 {
            recursive(x.wrapping_mul(3).wrapping_add(1), k - 1).wrapping_add(1)
        } else {
            x
        }
    }
    let a: Vec<u32> = (0..256).collect();
    let found = run("divergence", 1, 256, [&a, &[], &[]], 3 * 256 + 1);
    let value = |t: u32| {
        let mut v = match t % 9 {
            0 => t + 1,
            1 => t * 3,
            2 => t.wrapping_sub(7),
            3 => t ^ 5,
            4 => t * t,
            5 => !t,
            6 => t + t.count_ones(),
            _ => t,
        };
        let mut n = 0;
        while v != 1 && n < t & 15 {
            v = if v & 1 != 0 { v.wrapping_mul(3).wrapping_add(1) } else { v / 2 };
            n += 1;
            if v == 77 {
                break;
            }
        }
        if t.is_multiple_of(3) {
            v = v.wrapping_add(if t % 2 != 0 { 100 } else { (0..t % 7).map(|i| i * i).sum() });
        }
        v.wrapping_add(recursive(v, t & 3))
    };
    let values: Vec<u32> = (0..256).map(value).collect();
    let lanes = |t: usize, f: &dyn Fn(u32) -> bool| (0..32).fold(0, |m, l| m | (f(values[(t & !31) + l]) as u32) << l);
    for t in 0..256 {
        let expected = [values[t], lanes(t, &|v| v & 1 != 0), lanes(t, &|v| v % 4 == values[t] % 4)];
        assert_eq!(found[3 * t..3 * t + 3], expected, "thread {t}");
    }
    // threads 0 to 200 reach the last barrier; the others have returned
    assert_eq!(found[3 * 256], 201);
}

#[test]
fn atomics_of_four_blocks_add_up() {
    let found = run("atomics", 4, 128, [&[], &[], &[]], 9);
    let sum = 128 * 127 / 2;
    let (max, min) = ((0..128).map(|t| t * 7 % 101).max(), (0..128).map(|t| -(t * 7 % 103)).min());
    // sum, max, min, or, xor, 512 additions of 2, a counter modulo 10, the blocks' sums,
    // reducing barriers: count (64 odd threads) + 1000 * or + 10000 * and
    assert_eq!(found, [4 * sum, max.unwrap(), min.unwrap() as u32, u32::MAX, 0, 1024, 512 % 10, 4 * sum, 11064]);
}

#[test]
fn named_barriers_let_threads_read_what_others_wrote() {
    // the sum of what thread 63 - t wrote: i times its number, for i < 10
    let expected: Vec<u32> = (0..64).map(|t| 45 * (63 - t)).collect();
    assert_eq!(run("named_barriers", 2, 128, [&[], &[], &[]], 64), expected);
}

#[test]
fn spilled_registers_keep_their_values() {
    let a = words(64 * 64, 7);
    assert!(MODULES.iter().all(|m| m.kernel_info("spills").unwrap().spill_insts > 20));
    let found = run("spills", 1, 64, [&a, &[], &[]], 64 * 64);
    for t in 0..64 {
        let mut v: Vec<u32> = (0..64).map(|i| a[64 * i + t]).collect();
        for _ in 0..3 {
            for i in 0..64 {
                v[i] = v[i].wrapping_mul(v[(i * 7 + 3) & 63]).wrapping_add(v[(i + 1) & 63]);
            }
        }
        assert!((0..64).all(|i| found[64 * i + t] == v[i]), "thread {t}");
    }
}

/// Bits of a half that holds an integer of at most 11 bits.
fn half(x: i32) -> u32 {
    let magnitude = x.unsigned_abs();
    if magnitude == 0 {
        return 0;
    }
    let exponent = 31 - magnitude.leading_zeros();
    ((x < 0) as u32) << 15 | (exponent + 15) << 10 | (magnitude << (10 - exponent) & 0x3ff)
}

/// Returns element (i, j) of matrix `q`, of small integers without symmetry, so that a transposed result differs. Their sums are exact.
fn number(seed: usize, q: usize, i: usize, j: usize) -> i32 {
    ((seed * 31 + q * 13 + i * 17 + j * 7 + i * j * 5) % 23) as i32 - 11
}

/// Packs pairs of halves into words.
fn packed(halves: &[u32]) -> Vec<u32> {
    halves.chunks(2).map(|pair| pair[0] | pair[1] << 16).collect()
}

/// All layouts of mma.m8n8k4, each quad-pair with matrices of its own.
#[test]
fn hmma_884_multiplies_all_layouts() {
    let (a, b, c) = (|q, m, k| number(1, q, m, k), |q, k, n| number(2, q, k, n), |q, m, n| number(3, q, m, n));
    let product = |q: usize, m: usize, n: usize| c(q, m, n) + (0..4).map(|k| a(q, m, k) * b(q, k, n)).sum::<i32>();
    // lane -> its quad-pair (the 8 lanes that share a product) and its number there
    let place = |l: usize| (l / 4 % 4, l % 4 + l / 16 * 4);
    // element v of thread t of a quad-pair, as (row, column)
    let own = |t: usize, v: usize| (t, v);
    let across = |t: usize, v: usize| (4 * (t / 4) + v, t % 4);
    let of_f32 = |t: usize, v: usize| ((t & 1) + (v & 2) + 4 * (t >> 2), (v & 1) + (t & 2) + (v & 4));
    type Layout<'a> = &'a dyn Fn(usize, usize) -> (usize, usize);
    let fragment = |n: usize, layout: Layout, element: &dyn Fn(usize, usize, usize) -> u32| -> Vec<u32> {
        (0..32 * n)
            .map(|i| {
                let ((q, t), v) = (place(i / n), i % n);
                let (row, column) = layout(t, v);
                element(q, row, column)
            })
            .collect()
    };
    for (a_layout, a_at) in [("row", &own as Layout), ("col", &across)] {
        for (b_layout, b_at) in [("col", &own as Layout), ("row", &across)] {
            let left = packed(&fragment(4, a_at, &|q, m, k| half(a(q, m, k))));
            let right = packed(&fragment(4, b_at, &|q, n, k| half(b(q, k, n))));
            let sums = fragment(8, &of_f32, &|q, m, n| (c(q, m, n) as f32).to_bits());
            let expected = fragment(8, &of_f32, &|q, m, n| (product(q, m, n) as f32).to_bits());
            let kernel = format!("mma_f32_{a_layout}_{b_layout}");
            assert_eq!(run_on(&MODULES[0], &kernel, 1, 32, [&left, &right, &sums], &[0; 256]), expected, "{kernel}");
            let sums = packed(&fragment(8, &own, &|q, m, n| half(c(q, m, n))));
            let expected = packed(&fragment(8, &own, &|q, m, n| half(product(q, m, n))));
            let kernel = format!("mma_f16_{a_layout}_{b_layout}");
            assert_eq!(run_on(&MODULES[0], &kernel, 1, 32, [&left, &right, &sums], &[0; 128]), expected, "{kernel}");
        }
    }
}

/// A published latency: 4 cycles from an FFMA to one that depends on it, on both GPUs. The difference of two runs leaves out the launch.
#[test]
fn dependent_ffmas_take_four_cycles() {
    let values: Vec<u32> = (0..64).map(|i| (0.5 + i as f32 / 256.0).to_bits()).collect();
    for (module, gpu) in MODULES.iter().zip(["v100", "t4"]) {
        let cycles = |rounds: u32| {
            let options = TimingOptions { machine: Machine::named(gpu).unwrap(), dispatch: Dispatch::Static, ..Default::default() };
            // SAFETY: the extents live here.
            let report = launch(1, 32, [&[rounds], &values, &[]], &mut [0; 32], |l| unsafe { module.time("ffma_chain", l, &options) });
            report.unwrap().timing.cycles as f64
        };
        let each = (cycles(50) - cycles(10)) / (40.0 * 64.0); // a round has 64 FFMAs
        assert!((4.0..4.4).contains(&each), "{gpu}: {each}");
    }
}

/// Runs a kernel of sm_75 with one warp.
fn run_warp(kernel: &str, inputs: Inputs, out: usize) -> Vec<u32> {
    run_on(&TURING, kernel, 1, 32, inputs, &vec![u32::MAX; out]) // so that a zero that is not stored is seen
}

/// Returns register `which` of a fragment: lane 4g+t has elements 2t and 2t+1 of row g, in the next register of row g+8.
fn fragment(element: impl Fn(usize, usize) -> u32, which: usize) -> Vec<u32> {
    (0..32)
        .map(|l| {
            let (row, column) = (l / 4 + 8 * which, 2 * (l % 4));
            element(row, column) | element(row, column + 1) << 16
        })
        .collect()
}

#[test]
fn hmma_multiplies_matrices_of_halves() {
    let (a, b, c) = (|m, k| number(1, 0, m, k), |k, n| number(2, 0, k, n), |m, n| number(3, 0, m, n));
    let product = |m: usize, n: usize| c(m, n) + (0..8).map(|k| a(m, k) * b(k, n)).sum::<i32>();
    let left = [fragment(|m, k| half(a(m, k)), 0), fragment(|m, k| half(a(m, k)), 1)].concat();
    let right = fragment(|n, k| half(b(k, n)), 0);
    // f32: c0 and c1 are columns 2t and 2t+1 of row g, c2 and c3 of row g+8
    let place = |i: usize, l: usize| (l / 4 + 8 * (i >> 1), 2 * (l % 4) + (i & 1));
    let sums: Vec<u32> = (0..128).map(|i| place(i / 32, i % 32)).map(|(m, n)| (c(m, n) as f32).to_bits()).collect();
    let found = run_warp("hmma_f32", [&left, &right, &sums], 128);
    for (i, bits) in found.into_iter().enumerate() {
        let (m, n) = place(i / 32, i % 32);
        assert_eq!(f32::from_bits(bits), product(m, n) as f32, "row {m} column {n}");
    }
    let sums = [fragment(|m, n| half(c(m, n)), 0), fragment(|m, n| half(c(m, n)), 1)].concat();
    let expected = [fragment(|m, n| half(product(m, n)), 0), fragment(|m, n| half(product(m, n)), 1)].concat();
    assert_eq!(run_warp("hmma_f16", [&left, &right, &sums], 64), expected);
}

#[test]
fn imma_multiplies_matrices_of_bytes() {
    // bytes over the whole range
    let byte = |seed: usize, i: usize, j: usize| ((number(seed, 0, i, j) * 12) as u8).wrapping_add((i * j) as u8);
    let c = |m, n| 1000 * number(3, 0, m, n);
    let register = |seed: usize| -> Vec<u32> {
        (0..32).map(|l| u32::from_le_bytes(std::array::from_fn(|i| byte(seed, l / 4, 4 * (l % 4) + i)))).collect()
    };
    let place = |i: usize| (i % 32 / 4, 2 * (i % 4) + i / 32);
    let sums: Vec<u32> = (0..64).map(place).map(|(m, n)| c(m, n) as u32).collect();
    for (kernel, is_unsigned) in [("imma_s8", false), ("imma_u8", true)] {
        let a = |m, k| if is_unsigned { i32::from(byte(1, m, k)) } else { i32::from(byte(1, m, k) as i8) };
        let product = |m: usize, n: usize| (0..16).map(|k| a(m, k) * i32::from(byte(2, n, k) as i8)).sum::<i32>();
        let found = run_warp(kernel, [&register(1), &register(2), &sums], 64);
        for (i, word) in found.into_iter().enumerate() {
            let (m, n) = place(i);
            assert_eq!(word as i32, c(m, n) + product(m, n), "{kernel}, row {m} column {n}");
        }
    }
}

#[test]
fn ldsm_loads_and_transposes_matrices() {
    let memory: Vec<u32> = (0..512).map(|i| (2 * i) | (2 * i + 1) << 16).collect();
    // rows of 16 bytes anywhere, some of them the same
    let rows: Vec<usize> = (0..32).map(|l| (l * l * 3 + 5 * l) % 128).collect();
    let addresses: Vec<u32> = rows.iter().map(|&r| 16 * r as u32).collect();
    for (kernel, count, transposed) in
        [("ldsm_1", 1, false), ("ldsm_1t", 1, true), ("ldsm_2", 2, false), ("ldsm_2t", 2, true), ("ldsm_4", 4, false), ("ldsm_4t", 4, true)]
    {
        let found = run_warp(kernel, [&memory, &addresses, &[]], 128);
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
fn ldsm_needs_valid_addresses_of_all_lanes() {
    let memory = vec![0; 512];
    let with = |lane: usize, address: u32| {
        let mut addresses = vec![0; 32];
        addresses[lane] = address;
        try_run(1, &TURING, "ldsm_1", 1, 32, [&memory, &addresses, &[]], &[0; 128])
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
        let e = try_run(1, &TURING, kernel, 1, 31, [&words; 3], &[0; 512]).unwrap_err(); // 31 threads
        assert!(e.contains(&format!("{instruction} with a partial warp (mask 0x7fffffff)")), "{e}");
    }
}

#[test]
fn movm_transposes_a_matrix() {
    let element = |row: usize, column: usize| (8 * row + column) as u32;
    assert_eq!(run_warp("movm", [&fragment(element, 0), &[], &[]], 32), fragment(|row, column| element(column, row), 0));
}

#[test]
fn mufu_computes_powers_of_halves_and_tanh() {
    // a lane writes three words: 2^x of the lower half, 2^x of both halves, and tanh of its word as an fp32 number
    let inputs: Vec<u32> = (0..32).map(|l| half(l - 16) | half(l / 4) << 16).collect();
    let found = run_warp("special", [&inputs, &[], &[]], 96);
    for (l, words) in found.chunks(3).enumerate() {
        // bits of the half 2^x; below 2^-14 it is subnormal
        let power = |x: i32| match x {
            -14.. => ((x + 15) as u32) << 10,
            _ => 1 << (x + 24),
        };
        assert_eq!(words[..2], [power(l as i32 - 16), power(l as i32 - 16) | power(l as i32 / 4) << 16], "lane {l}");
    }
    let inputs: Vec<u32> = (0..32).map(|l| (l as f32 / 8.0 - 2.0).to_bits()).collect();
    for (x, words) in inputs.iter().zip(run_warp("special", [&inputs, &[], &[]], 96).chunks(3)) {
        let (x, found) = (f32::from_bits(*x), f32::from_bits(words[2]));
        assert!((found - x.tanh()).abs() < 1e-6, "tanh of {x}: {found}");
    }
}

#[test]
fn rejects_a_gpu_of_another_architecture() {
    let words = vec![0; 512];
    let time = |name: &str| {
        let options = TimingOptions { machine: Machine::named(name).unwrap(), ..Default::default() };
        // SAFETY: the extents live here.
        launch(1, 32, [&words; 3], &mut [0; 512], |l| unsafe { TURING.time("ldsm_4", l, &options) })
    };
    let e = time("v100").unwrap_err().to_string();
    assert_eq!(e, "the cubin is for sm_75, a v100 runs sm_70");
    let report = time("t4").unwrap();
    assert_eq!(report.timing.mix["LDSM.4"], 1);
    assert!((1_000..10_000).contains(&report.timing.cycles), "{} cycles", report.timing.cycles);
    assert_eq!(Machine::names(), ["v100", "pg503", "t4", "rtx2080ti", "titanrtx"]);
    assert!(Machine::named("t5").is_none());
}
