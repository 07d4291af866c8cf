//! Rows of Turing's forward kernels, and the reasons for their tiles. docs/design/turing-forward.md has figures and what else was tried.
//!
//! A row of the table is a kernel; rows of a block, a warp or Q are queries. A block has `block_rows` queries and steps over `step` keys.
//! Plain kernels have no features, varlen and generic ones sets of src/kernels/features.rs; others require one feature. A `...Grid` in a
//! source is the C++ type that gives a block its rows, heads and keys. A thread can have 255 registers, an SM 64 KB of shared memory and
//! 64 Ki registers. A warp's tile takes of each lane one register for 32 fp32 numbers (output), or for 64 fp16 numbers (Q).

use super::super::shared::{self, with};
use super::super::variants::{Feature, FeatureSet, Pass, Size, Source, Variant};
use super::family::TURING;

const PIPELINED: Source = Source::new(&["turing/forward/pipelined.cuh"], "turing::Pipelined<turing::DenseGrid>");
/// The same for blocks of 4 heads, whose 4 warps have the rows of a head each.
const PIPELINED_HEADS: Source = Source::new(&["turing/forward/pipelined.cuh"], "turing::Pipelined<turing::HeadGroupGrid<4>>");
// Reads a list of the key blocks that 128 rows see. The argument is true above headdim 64: generic kernels there keep less of the list in
// registers, but wait for its loads.
const PIPELINED_BLOCK_MASK: Source = Source::new(
    &["turing/forward/pipelined.cuh", "turing/forward/block_mask.cuh"],
    "turing::Pipelined<turing::BlockMaskGrid<(HEADDIM > 64)>>",
)
.with_arguments("p.forward, turing::BlockMaskGrid<(HEADDIM > 64)>(p)");

/// `turing/forward/pipelined`: steps of 16 keys of K and V, fp16, through a ring of 4 or 8 slots in shared memory. A warp has 16, 32 or 48
/// rows, as many as registers allow: one fragment of K or V serves all of them, and shared memory is half as fast as Volta's.
const fn pipelined((headdim, headdim_v): (u32, u32), size: Size, (warps, rows): (u32, u32), slots: u32, blocks_per_sm: u32) -> Variant {
    let step = 16;
    Variant {
        headdim,
        headdim_v,
        block_rows: warps * rows,
        step,
        size,
        threads: 32 * warps,
        shared_bytes: slots * step * 2 * (headdim + headdim_v), // 2: fp16
        blocks_per_sm,
        ..Variant::new(TURING, Pass::Forward, PIPELINED)
    }
}

const COLUMN_GROUPS: Source = Source::new(&["turing/forward/column_groups.cuh"], "turing::ForwardColumnGroups<HEADDIM, BLOCK_ROWS>");

/// `turing/forward/column_groups`: 8 warps, a group of them for each 32 rows. The warps of a group divide the columns. Shared memory has a
/// tile of K and one of V, and partial scores (fp32) of each warp's 32 rows. After these come probabilities (fp16) and a factor (fp32) of
/// each row, and 32 bytes for two addresses and two lengths.
const fn column_groups(headdim: u32, (block_rows, size): (u32, Size)) -> Variant {
    let (step, warps) = (16, 8);
    Variant {
        headdim,
        headdim_v: headdim,
        block_rows,
        step,
        size,
        threads: 32 * warps,
        shared_bytes: step * 2 * (headdim + headdim) + warps * 32 * step * 4 + block_rows * (2 * step + 4) + 32,
        ..Variant::new(TURING, Pass::Forward, COLUMN_GROUPS)
    }
}

// Plain kernels, from which the others are made. Arguments of `pipelined`: headdims of q and v, size, (warps, rows of a warp), slots, and
// blocks that an SM must hold; of `column_groups`: headdim, rows of a block, size. Comments count registers of a thread, and shared memory.

/// 48 registers of Q and 96 of output; 32 KB: two blocks.
const PLAIN_64: Variant = pipelined((64, 64), Size::Large, (4, 48), 8, 2);
/// 64 registers of Q and 128 of output; the 64 KB that an SM has.
const PLAIN_128: Variant = pipelined((128, 128), Size::Large, (8, 32), 8, 1);
/// As at headdim 192, 16 rows a warp.
const PLAIN_256: Variant = pipelined((256, 256), Size::Large, (8, 16), 4, 1);
/// 64 registers of Q and 128 of output, for 32 rows and a quarter of the columns; then half of the rows and registers, for small grids.
const PLAIN_512: [Variant; 2] = [column_groups(512, (64, Size::Large)), column_groups(512, (32, Size::Small))];
const PLAIN: [Variant; 15] = {
    use Size::{Large, Medium, Small};
    [
        pipelined((32, 32), Large, (4, 32), 8, 4),
        PLAIN_64,
        // Fewer rows a warp, for grids that would leave SMs idle.
        pipelined((64, 64), Medium, (4, 32), 8, 2),
        pipelined((64, 64), Small, (4, 16), 8, 2),
        pipelined((96, 96), Large, (8, 32), 8, 1),
        pipelined((96, 96), Medium, (8, 16), 8, 1),
        pipelined((96, 96), Small, (4, 16), 4, 1),
        PLAIN_128,
        pipelined((128, 128), Medium, (8, 16), 8, 1),
        // One block, though two fit: two of 64 rows are slower than one of 128.
        pipelined((128, 128), Small, (4, 16), 4, 1),
        // 32 rows of Q and of output do not fit: 16 rows a warp.
        pipelined((192, 128), Large, (8, 16), 4, 1),
        pipelined((192, 192), Large, (8, 16), 4, 1),
        PLAIN_256,
        PLAIN_512[0],
        PLAIN_512[1],
    ]
};
/// 32 rows of 4 heads, for short windows: they see 159 keys under a window of 128; 128 rows of one head see 255.
const HEADS_64: Variant = Variant { source: PIPELINED_HEADS, block_rows: 32, heads: 4, ..pipelined((64, 64), Size::Small, (4, 32), 8, 2) };
/// The large kernels of four headdims. Where only these have variants, other headdims are padded to the next.
const PADDED: [Variant; 4] = [PLAIN_64, PLAIN_128, PLAIN_256, PLAIN_512[0]];

/// Returns the kernel with this many warps, and rows of a warp.
fn of_rows((warps, warp_rows): (u32, u32), size: Size, row: Variant) -> Variant {
    Variant { block_rows: warps * warp_rows, threads: 32 * warps, size, ..row }
}

/// Returns a kernel with all features. Features of scores take registers, so it has fewer rows a warp than the plain kernel.
fn generic(plain: Variant) -> Variant {
    if plain.source == COLUMN_GROUPS {
        // 16 columns of Q move from registers to shared memory: of every 8 columns a lane has 16 bytes (32 rows, fp16)
        let columns_of_q = if plain.block_rows == 64 { 2 * 16 * plain.threads } else { 0 };
        return Variant { shared_bytes: plain.shared_bytes + columns_of_q, ..plain }.with_features(FeatureSet::GENERIC);
    }
    let rows = if plain.headdim <= 64 { (4, 32) } else { (8, 16) };
    let blocks_per_sm = if plain.headdim == 32 { 3 } else { plain.blocks_per_sm };
    // the choice between fp16 and fp32 output would spill at headdim 256: such calls run the kernel of headdim 512
    let features =
        if plain.headdim == 256 { FeatureSet::GENERIC.without(FeatureSet::of(&[Feature::Fp32Output])) } else { FeatureSet::GENERIC };
    Variant { blocks_per_sm, ..of_rows(rows, Size::Large, plain).with_features(features) }
}

/// Returns a kernel with one feature and as many rows a warp as the plain kernel, whose registers are all in use. Values of the feature lie
/// in shared memory, 32 bytes of each thread. The plain kernel may take all 64 KB, so this one has half the slots.
fn with_all_rows(feature: Feature, plain: Variant) -> Variant {
    with(feature, Variant { shared_bytes: plain.shared_bytes / 2 + 32 * plain.threads, ..plain })
}

/// Returns the kernels that require one feature of scores, at headdims 64 and 128; some in a medium size too.
fn required_rows() -> impl Iterator<Item = Variant> {
    use Size::*;
    let of_feature = |feature| {
        let fewer_rows = |size| [of_rows((4, 32), size, PLAIN_64), of_rows((8, 16), size, PLAIN_128)].map(|tile| with(feature, tile));
        let ([large_64, large_128], [medium_64, medium_128]) = (fewer_rows(Large), fewer_rows(Medium));
        match feature {
            Feature::Alibi => vec![with(feature, PLAIN_64), medium_64, with_all_rows(feature, PLAIN_128), medium_128],
            Feature::Dropout => vec![large_64, with_all_rows(feature, PLAIN_128), medium_128],
            _ => vec![large_64, large_128],
        }
    };
    Feature::OF_SCORES.into_iter().flat_map(of_feature)
}

/// Kernels of block masks (`csrc/forward/block_mask.cuh`). A block has 128 rows, as many as a list of key blocks is for. There are three
/// headdims, and other headdims are padded to the next. At headdim 128 two blocks an SM, of four slots each, replace the plain kernel's one
/// of 256 rows. At 256 the plain kernel has no registers for lists, so problems of any features run the generic one.
fn block_mask_rows() -> impl Iterator<Item = Variant> {
    let with_blocks = |row: Variant, features| row.with_blocks(features, PIPELINED_BLOCK_MASK);
    let plain = [of_rows((4, 32), Size::Large, PLAIN_64), pipelined((128, 128), Size::Large, (4, 32), 4, 2)];
    let plain = plain.into_iter().map(move |row| with_blocks(row, FeatureSet::of(&[Feature::Fp32Output])));
    let generic = [PLAIN_64, PLAIN_128, PLAIN_256].map(generic);
    plain.chain(generic.into_iter().map(move |row| with_blocks(row, FeatureSet::GENERIC_BLOCKS)))
}

pub fn forward_rows() -> impl Iterator<Item = Variant> {
    // the kernels that have all versions: the large ones, and of headdim 512 both sizes
    let is_complete = |row: &Variant| row.size == Size::Large || row.source == COLUMN_GROUPS;
    let has_varlen = move |row: &Variant| is_complete(row) || (row.headdim, row.size) == (64, Size::Medium);
    // at headdims 32, 96 and 192 varlen kernels take at most 4% more time than plain ones would
    let is_plain = |row: &Variant| row.size != Size::Large || !matches!(row.headdim, 32 | 96 | 192);
    PLAIN
        .into_iter()
        .filter(is_plain)
        .chain(PLAIN.into_iter().filter(has_varlen).chain([HEADS_64]).map(|row| row.with_features(FeatureSet::VARLEN)))
        .chain(PADDED.map(|row| row.with_features(FeatureSet::FP32_OUTPUT)))
        .chain(required_rows())
        // no generic kernel of headdims 192 x 128: V padded to 192 costs less than another kernel in the library
        .chain(PLAIN.into_iter().filter(is_complete).filter(|row| row.headdim == row.headdim_v).map(generic))
        .chain(block_mask_rows())
}

/// Kernels of batch-invariant calls, in which a row's bits depend on no other row.
pub fn invariant_rows() -> impl Iterator<Item = Variant> {
    shared::invariant_forward(PLAIN, PADDED.map(generic))
}

/// The kernels of fp32 tensors, whose numbers are split into two fp16 parts. A tuple has the headdim, the warps, the blocks of an SM, and
/// the bytes of a row of Q in shared memory: none, because registers hold Q. Q and the output are 64 registers at headdim 64, 128 at 128;
/// three blocks an SM would spill at 64.
pub fn split_rows() -> impl Iterator<Item = Variant> {
    shared::split_forward(TURING, &[(64, 4, 2, 0), (128, 8, 1, 0), (256, 8, 1, 0), (512, 8, 1, 0)])
}

pub fn split_stream_k_rows() -> impl Iterator<Item = Variant> {
    shared::split_stream_k(TURING, split_rows())
}

/// Prefill kernels: the same tiles over a KV cache, whose rows they find by a block table. They have four headdims, and other headdims are
/// padded to the next: chunks of prompts run here, not training. Chunks have few rows, so small blocks matter.
pub fn prefill_rows() -> impl Iterator<Item = Variant> {
    use Size::*;
    let paged = |row: Variant| Variant { pass: Pass::Prefill, ..row };
    let plain = [
        PLAIN_64,
        of_rows((4, 32), Medium, PLAIN_64),
        HEADS_64,
        of_rows((4, 16), Small, PLAIN_64),
        PLAIN_128,
        of_rows((8, 16), Medium, PLAIN_128),
        of_rows((4, 16), Small, PLAIN_128),
        PLAIN_256,
    ];
    let plain = plain.into_iter().chain(PLAIN_512).map(move |row| paged(row).with_features(FeatureSet::PAGED));
    let generic = [PLAIN_64, PLAIN_128, PLAIN_256].into_iter().chain(PLAIN_512).map(generic);
    plain.chain(generic.map(move |row| paged(row).with_features(FeatureSet::GENERIC.union(FeatureSet::PAGED))))
}
