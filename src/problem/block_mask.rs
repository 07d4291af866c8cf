//! Rules of a block mask: lists of the blocks of scores that exist, bits of those that exist in part. src/ops/block_mask.rs passes values.
//!
//! The scores of a head are a matrix of queries by keys, divided into blocks of 128 rows by 64 columns. A row block's list names its column
//! blocks. Transposed lists (`block_lists_t`, for gradients) divide the transposed matrix: their rows are keys, and their columns queries.

use super::checks::*; // check_... and reject_if!: errors for the user; unknown sizes pass
use super::tensor::{DType, Options, TensorDesc};
use crate::error::{Error, Result};
use crate::options::UNKNOWN; // a symbolic size or number (torch.compile)

/// Rows of a row block: queries; in transposed lists, keys.
pub const BLOCK_ROWS: i64 = 128;
/// Columns of a column block: keys; in transposed lists, queries.
pub const BLOCK_COLUMNS: i64 = 64;
/// Numbers of a list before its column blocks: both counts, the first tile of bits, the row block of this place in the launch order.
pub const LIST_HEADER: i64 = 4;
/// Words of a tile of bits: a bit for each score of a block.
pub const TILE_WORDS: i64 = BLOCK_ROWS * BLOCK_COLUMNS / 32;

/// The tensors of one direction of a block mask.
struct Side<'a> {
    lists: (&'static str, Option<&'a TensorDesc>),
    bits: (&'static str, Option<&'a TensorDesc>),
    /// Name and value of the length that the row blocks divide.
    rows: (&'static str, i64),
}

/// Checks the block mask of `fwd` or `bwd`, whose lengths are `seqlen_q` and `seqlen_k`.
pub fn check(o: &Options, q: &TensorDesc, [seqlen_q, seqlen_k]: [i64; 2]) -> Result<()> {
    let usual =
        Side { lists: ("block_lists", o.block_lists.as_ref()), bits: ("block_bits", o.block_bits.as_ref()), rows: ("seqlen_q", seqlen_q) };
    let transposed = Side {
        lists: ("block_lists_t", o.block_lists_t.as_ref()),
        bits: ("block_bits_t", o.block_bits_t.as_ref()),
        rows: ("seqlen_k", seqlen_k),
    };
    check_side(&usual, q)?;
    check_side(&transposed, q)?;
    let others = [("attn_bias", &o.attn_bias), ("cu_seqlens_q", &o.cu_seqlens_q), ("cu_seqlens_k", &o.cu_seqlens_k)];
    match (&o.block_lists, &o.block_lists_t, others.into_iter().find(|(_, t)| t.is_some())) {
        (None, Some(_), _) => Err(Error::value("block_lists_t", "a tensor", "None, since block_lists is not given")),
        (Some(_), _, Some((name, _))) => {
            Err(Error::value("block_lists", format!("a tensor together with {name}"), "one of the two to be None"))
        }
        _ => Ok(()),
    }
}

/// Checks that `bwd` has the lists of both directions.
pub fn check_backward(o: &Options) -> Result<()> {
    if o.block_lists.is_some() && o.block_lists_t.is_none() {
        return Err(Error::value("block_lists_t", "None", "a tensor, since block_lists is given: gradients need both"));
    }
    Ok(())
}

fn check_side(side: &Side, q: &TensorDesc) -> Result<()> {
    let ((name, lists), (bits_name, bits)) = (side.lists, side.bits);
    let Some(lists) = lists else {
        return match bits {
            Some(_) => Err(Error::value(bits_name, "a tensor", format!("None, since {name} is not given"))),
            None => Ok(()),
        };
    };
    check_dtype(name, lists, DType::Int32)?;
    check_device(name, lists, q)?;
    let (length, rows) = side.rows;
    let row_blocks = if rows == UNKNOWN { UNKNOWN } else { (rows + BLOCK_ROWS - 1) / BLOCK_ROWS };
    let at_least = |n: i64, least: i64| n == UNKNOWN || n >= least;
    // found: row blocks; columns: numbers of a list
    match lists.sizes[..] {
        [batch, heads, found, columns]
            if at_least(batch, 1) && at_least(heads, 1) && same_size(found, row_blocks) && at_least(columns, LIST_HEADER) => {}
        _ => {
            let allowed = format!(
                "shape (mask batch, mask heads, {length} / {BLOCK_ROWS} rounded up, {LIST_HEADER} + entries), here (>= 1, >= 1, {}, >= {LIST_HEADER})",
                number(row_blocks)
            );
            return Err(Error::value(name, shape(lists), allowed));
        }
    }
    check_contiguous_last(name, lists)?;
    let Some(bits) = bits else { return Ok(()) };
    check_int32(bits_name, bits, q, &[UNKNOWN, TILE_WORDS], "(tiles, 256)")?;
    check_at_most(bits_name, "tiles", bits.sizes[0], i64::from(i32::MAX))
}

/// Values of the lists of one direction.
pub struct ListValues<'a> {
    /// The argument that holds them.
    pub name: &'a str,
    /// The lists, contiguous.
    pub values: &'a [i32],
    /// (mask batch, mask heads, row blocks, numbers of a list)
    pub sizes: [i64; 4],
    /// Tiles of bits.
    pub tiles: i64,
    /// Positions that the column blocks divide: seqlen_k; of transposed lists, seqlen_q.
    pub columns: i64,
}

/// Checks the values of lists. Errors name the list.
pub fn validate_block_lists(lists: &ListValues<'_>) -> Result<()> {
    let [_, heads, row_blocks, size] = lists.sizes;
    if size == 0 || row_blocks == 0 {
        return Ok(());
    }
    let mut taken = vec![false; row_blocks as usize];
    for (i, list) in lists.values.chunks_exact(size as usize).enumerate() {
        let i = i as i64;
        let place = format!("list ({}, {}, {})", i / row_blocks / heads, i / row_blocks % heads, i % row_blocks);
        if i % row_blocks == 0 {
            taken.fill(false);
        }
        check_list(lists, list, &place)?;
        let order = i64::from(list[3]); // the row block that is launched at this list's place
        if !(0..row_blocks).contains(&order) || std::mem::replace(&mut taken[order as usize], true) {
            let allowed = format!("each row block from 0 to {} once for each batch entry and head (number 3 of a list)", row_blocks - 1);
            return Err(Error::value(lists.name, format!("row block {order} to launch in {place}"), allowed));
        }
    }
    Ok(())
}

/// Checks one list: its counts, tiles and column blocks. `place`: which list, for errors.
fn check_list(lists: &ListValues<'_>, list: &[i32], place: &str) -> Result<()> {
    let room = list.len() as i64 - LIST_HEADER;
    let column_blocks = (lists.columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
    let [partial, full, tile] = [list[0], list[1], list[2]].map(i64::from);
    if partial < 0 || full < 0 || partial + full > room {
        let given = format!("{partial} partial and {full} full blocks in {place}");
        return Err(Error::value(lists.name, given, format!("counts from 0 whose sum is at most {room}, the entries of a list")));
    }
    if partial > 0 && (tile < 0 || tile + partial > lists.tiles) {
        let given = format!("tiles {tile} to {} in {place}", tile + partial - 1);
        return Err(Error::value(lists.name, given, format!("tiles from 0 to {}, those of its bits", lists.tiles - 1)));
    }
    let (entries, partial) = (&list[LIST_HEADER as usize..][..(partial + full) as usize], partial as usize);
    if let Some(entry) = entries.iter().find(|&&entry| !(0..column_blocks).contains(&i64::from(entry))) {
        let allowed = format!("blocks from 0 to {}", column_blocks - 1);
        return Err(Error::value(lists.name, format!("block {entry} in {place}"), allowed));
    }
    let (partial, full) = entries.split_at(partial);
    for part in [partial, full] {
        if let Some(pair) = part.windows(2).find(|pair| pair[0] >= pair[1]) {
            let given = format!("block {} after {} in {place}", pair[1], pair[0]);
            return Err(Error::value(lists.name, given, "partial and full blocks that ascend, each part by itself"));
        }
    }
    match full.iter().find(|entry| partial.binary_search(entry).is_ok()) {
        Some(entry) => Err(Error::value(lists.name, format!("block {entry} as partial and as full in {place}"), "one of the two")),
        None => Ok(()),
    }
}
