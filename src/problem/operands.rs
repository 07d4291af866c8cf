//! Rules of q, k and v as tensors: ranks, dtypes, layouts, heads and headdims. Packed tensors have no batch dimension: the rows of all
//! sequences follow each other, and cu_seqlens arguments say where each begins. Unknown sizes pass.

use super::checks::*; // check_... and reject_if!: errors for the user; unknown sizes pass
use super::tensor::{Backend, TensorDesc};
use crate::error::{Error, Result};
use crate::limits::{MAX_HEADDIM, MAX_HEADS, MAX_SEQLEN}; // 512, 65535 and 2^29 - 1
use crate::options::UNKNOWN; // a symbolic size or number (torch.compile)

/// Sizes of a (batch, seqlen, nheads, headdim) or a packed (total, nheads, headdim) tensor.
#[derive(Clone, Copy)]
pub struct Sizes {
    /// 0 if packed.
    pub batch: i64,
    /// total if packed.
    pub rows: i64,
    pub nheads: i64, // of this tensor: of k and v, KV heads
    pub headdim: i64,
}

/// Whether tensors are packed, with the name of the argument that decides it, for errors.
#[derive(Clone, Copy)]
pub enum Packing<'a> {
    /// They are not packed; packed tensors need this argument.
    Needs(&'a str),
    /// They are packed, because this argument is given.
    Since(&'a str),
}

impl Packing<'_> {
    pub fn is_packed(self) -> bool {
        matches!(self, Packing::Since(_))
    }

    /// Returns the name that errors give the dimension of rows.
    pub fn rows(self) -> &'static str {
        match self {
            Packing::Needs(_) => "seqlen",
            Packing::Since(_) => "total",
        }
    }
}

/// Reads the sizes of a tensor. Rejects another rank.
pub fn sizes(name: &str, d: &TensorDesc, packing: Packing<'_>) -> Result<Sizes> {
    let allowed = match (packing, &d.sizes[..]) {
        (Packing::Needs(_), &[batch, rows, nheads, headdim]) => return Ok(Sizes { batch, rows, nheads, headdim }),
        (Packing::Since(_), &[rows, nheads, headdim]) => return Ok(Sizes { batch: 0, rows, nheads, headdim }),
        (Packing::Needs(cu), _) => format!("rank 4, (batch, seqlen, nheads, headdim); packed (total, nheads, headdim) needs {cu}"),
        (Packing::Since(cu), _) => format!("rank 3, (total, nheads, headdim), since {cu} is given"),
    };
    Err(Error::value(name, rank(d), allowed))
}

/// Checks q, k or v: dtype, rank, likeness to q, layout and rows. Returns its sizes.
pub fn check_operand(name: &str, d: &TensorDesc, q: &TensorDesc, packing: Packing<'_>, backend: Backend) -> Result<Sizes> {
    check_compute_dtype(name, d, backend)?;
    let sizes = sizes(name, d, packing)?;
    check_like_q(name, d, q)?;
    check_layout(name, d, backend)?;
    check_at_most(name, packing.rows(), sizes.rows, MAX_SEQLEN)?;
    Ok(sizes)
}

/// Rejects a headdim that kernels do not have.
pub fn check_headdim(name: &str, headdim: i64) -> Result<()> {
    if headdim != UNKNOWN && !(1..=MAX_HEADDIM).contains(&headdim) {
        return Err(Error::value(name, format!("headdim {headdim}"), format!("a headdim from 1 to {MAX_HEADDIM}")));
    }
    Ok(())
}

/// Checks query heads against KV heads; `keys` names the tensors that have these.
pub fn check_heads(nheads: i64, nheads_k: i64, keys: &str) -> Result<()> {
    if nheads > 0 && nheads_k != UNKNOWN && (nheads_k == 0 || nheads % nheads_k != 0) {
        let layout = "pass (batch, seqlen, nheads, headdim), or packed (total, nheads, headdim), not heads first";
        let expected = format!("a multiple of nheads_k {nheads_k}, that of {keys}: {layout}");
        return Err(Error::value("q", format!("nheads {nheads}"), expected));
    }
    check_at_most("q", "nheads", nheads, MAX_HEADS)
}
