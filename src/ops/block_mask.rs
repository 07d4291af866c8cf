//! The tensors of a block mask on the way to kernels: mod.rs checks their values, device.rs and cast.rs fill [`BlockLists`] of parameter
//! blocks (kernels' arguments).
//!
//! A list (`block_lists`, int32) names the blocks of 64 keys that a block of 128 queries of a head sees, in full or in part. A tile of
//! `block_bits` has a bit for each score of a block seen in part. `block_lists_t` and `block_bits_t` are the same with queries and keys
//! exchanged, for dk and dv. src/problem/block_mask.rs has the format.

use super::inputs::Inputs;
use crate::error::Result;
use crate::options::Options;
use crate::params::BlockLists;
use crate::problem::{validate_block_lists, Attention, ListValues, LIST_HEADER}; // LIST_HEADER: numbers before a list's blocks
use crate::tensor::{copied, Absent}; // Absent: NONE, a block of null pointers and zeros
use std::ptr::null;
use tch::{Device, Kind, Tensor};

/// Alignment of bits that kernels read together, bytes.
const ALIGNMENT: usize = 16;

/// Checks the values of the lists of both directions. On a GPU this synchronizes once.
pub fn check_values(inputs: &Inputs, a: &Attention) -> Result<()> {
    let o = &inputs.options;
    // name, lists, bits, and the length of the side that the lists name blocks of: keys, and with exchanged roles queries
    let directions =
        [("block_lists", &o.block_lists, &o.block_bits, a.seqlen_k), ("block_lists_t", &o.block_lists_t, &o.block_bits_t, a.seqlen_q)];
    let flat = directions.iter().filter_map(|(_, lists, ..)| Some(lists.as_ref()?.f_reshape([-1_i64].as_slice())));
    let all = Tensor::f_cat(&flat.collect::<std::result::Result<Vec<_>, _>>()?, 0)?;
    let values = Vec::<i32>::try_from(all.f_to_device(Device::Cpu)?)?;
    let mut rest = values.as_slice();
    for (name, lists, bits, columns) in directions {
        let Some(lists) = lists else { continue };
        let (batch, heads, rows, size) = lists.size4()?; // rows: blocks of the other side; size: numbers of a list
        let (values, others) = rest.split_at(lists.numel());
        rest = others;
        let tiles = bits.as_ref().map_or(0, |t| t.size()[0]);
        validate_block_lists(&ListValues { name, values, sizes: [batch, heads, rows, size], tiles, columns })?;
    }
    Ok(())
}

/// Returns bits as kernels read them: contiguous, on 16-byte boundaries.
pub fn readable_bits(bits: &Tensor) -> Result<Tensor> {
    let bits = bits.f_contiguous()?;
    if bits.data_ptr() as usize % ALIGNMENT == 0 {
        return Ok(bits);
    }
    copied(&bits, Kind::Int)
}

/// The parameters of a call without a block mask. `batch` and `heads` are 1, because kernels take entries and heads modulo them.
pub const NO_BLOCKS: BlockLists = BlockLists { batch: 1, heads: 1, ..BlockLists::NONE };

/// Returns the parameters of the lists of keys that blocks of queries see; None: the call has no block mask.
pub fn of_queries(o: &Options<Tensor>) -> Option<BlockLists> {
    block_lists(&o.block_lists, &o.block_bits)
}

/// Returns the parameters of the lists of queries that see blocks of keys.
pub fn of_keys(o: &Options<Tensor>) -> Option<BlockLists> {
    block_lists(&o.block_lists_t, &o.block_bits_t)
}

/// Returns the parameters of one direction. `bits` come from [`readable_bits`].
fn block_lists(lists: &Option<Tensor>, bits: &Option<Tensor>) -> Option<BlockLists> {
    let (lists, bits) = (lists.as_ref()?, bits.as_ref());
    let (sizes, strides) = (lists.size(), lists.stride());
    Some(BlockLists {
        lists: lists.data_ptr() as *const i32,
        batch_stride: strides[0],
        head_stride: strides[1],
        row_stride: strides[2],
        bits: bits.map_or(null(), |t| t.data_ptr() as *const u32),
        tiles: bits.map_or(0, |t| t.size()[0] as i32),
        batch: sizes[0] as i32,
        heads: sizes[1] as i32,
        max_entries: (sizes[3] - LIST_HEADER) as i32,
    })
}
