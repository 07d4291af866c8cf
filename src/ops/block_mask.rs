//! The tensors of a block mask on the way to kernels: checks their values, and fills [`BlockLists`] of parameter blocks.
//!
//! A list (`block_lists`, int32) names the blocks of 64 keys that a block of 128 queries of a head sees, in full or in part. A tile of
//! `block_bits` has a bit for each score of a block seen in part. `block_lists_t` and `block_bits_t` are the same with queries and keys
//! exchanged, for dk and dv. src/problem/block_mask.rs has the format.

use super::inputs::Inputs;
use crate::error::Result;
use crate::options::Options;
use crate::params::BlockLists;
use crate::problem::{validate_block_lists, Attention, ListValues, LIST_HEADER};
use crate::tensor::{copied, Absent};
use std::ptr::null;
use tch::{Device, Kind, Tensor};

/// Alignment of bits that kernels read together, bytes.
const ALIGNMENT: usize = 16;

/// Returns (lists, bits, name of the lists, length that their column blocks divide) of each direction that is given: column blocks are keys
/// in the first, queries in the second.
fn sides<'a>(o: &'a Options<Tensor>, a: &Attention) -> impl Iterator<Item = (&'a Tensor, Option<&'a Tensor>, &'static str, i64)> {
    let sides =
        [(&o.block_lists, &o.block_bits, "block_lists", a.seqlen_k), (&o.block_lists_t, &o.block_bits_t, "block_lists_t", a.seqlen_q)];
    sides.into_iter().filter_map(|(lists, bits, name, columns)| Some((lists.as_ref()?, bits.as_ref(), name, columns)))
}

/// Checks the values of all lists, copied together. On a GPU this synchronizes once.
pub fn check_values(inputs: &Inputs, a: &Attention) -> Result<()> {
    let o = &inputs.options;
    let numbers = |lists: &Tensor| lists.numel() as i64;
    let all = Tensor::f_empty([sides(o, a).map(|(lists, ..)| numbers(lists)).sum::<i64>()], (Kind::Int, inputs.q.device()))?;
    let mut first = 0;
    for (lists, ..) in sides(o, a) {
        all.f_narrow(0, first, numbers(lists))?.f_view(lists.size().as_slice())?.f_copy_(lists)?;
        first += numbers(lists);
    }
    let values = Vec::<i32>::try_from(all.f_to_device(Device::Cpu)?)?;
    let mut rest = values.as_slice();
    for (lists, bits, name, columns) in sides(o, a) {
        let (batch, heads, rows, size) = lists.size4()?;
        let (values, others) = rest.split_at(lists.numel());
        rest = others;
        let tiles = bits.map_or(0, |t| t.size()[0]);
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

/// Returns the parameters of one direction. `bits` come from [`readable_bits`].
pub fn block_lists(lists: &Tensor, bits: Option<&Tensor>) -> BlockLists {
    let (sizes, strides) = (lists.size(), lists.stride());
    BlockLists {
        lists: lists.data_ptr() as *const i32,
        batch_stride: strides[0],
        head_stride: strides[1],
        row_stride: strides[2],
        bits: bits.map_or(null(), |t| t.data_ptr() as *const u32),
        tiles: bits.map_or(0, |t| t.size()[0] as i32),
        batch: sizes[0] as i32,
        heads: sizes[1] as i32,
        max_entries: (sizes[3] - LIST_HEADER) as i32,
    }
}
