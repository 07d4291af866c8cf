//! Launches of grids of equal shares: their scratch memory, and who has what.

use super::device::{at, call_number};
use crate::error::Result;
use crate::launch::{Launcher, MemoryRange};
use crate::params::{FwdParams, FwdSharesParams, ShareGrid, SharePiece};
use crate::plan::{Dealt, EqualShares, PlannedKernel, MAX_PIECES};
use crate::tensor::{self, memory_range};
use std::cell::RefCell;
use std::rc::Rc;
use tch::{Device, Kind, Tensor};

/// What a launch has beside the parameters of the usual grids.
pub struct Launch {
    dealt: Rc<Dealt>,
    planned: EqualShares,
    /// the results of pieces, and behind them who has arrived
    scratch: Tensor,
    partials: i64,
}

/// Who has what: a thread remembers the last answer, since a model's layers all ask the same.
fn dealt(shares: EqualShares) -> Rc<Dealt> {
    thread_local!(static LAST: RefCell<Option<(EqualShares, Rc<Dealt>)>> = const { RefCell::new(None) });
    LAST.with_borrow_mut(|last| match last {
        Some((same, dealt)) if *same == shares => dealt.clone(),
        _ => last.insert((shares, Rc::new(shares.deal()))).1.clone(),
    })
}

impl Launch {
    pub fn new(kernel: &PlannedKernel, planned: EqualShares, device: Device, launcher: &dyn Launcher) -> Result<Launch> {
        let dealt = dealt(planned);
        // of a row: its output in fp32, and 8 lanes' references and sums, or 16 lanes' of half the columns (`put_result` in layout.cuh)
        let floats = i64::from(kernel.variant.block_rows) * (i64::from(kernel.variant.headdim_v) + 8);
        let partials = i64::from(planned.cut_rows) * i64::from(dealt.most_pieces) * floats;
        let scratch = tensor::empty(&[partials + 2 * i64::from(planned.cut_rows)], Kind::Float, device, launcher.output_alignment())?;
        Ok(Launch { dealt, planned, scratch, partials })
    }

    pub fn ranges(&self) -> [MemoryRange; 1] {
        [memory_range("scratch", &self.scratch, true)]
    }

    /// The parameter block.
    pub fn params(&self, forward: FwdParams, launcher: &dyn Launcher) -> Result<FwdSharesParams> {
        let mut pieces = [SharePiece::default(); MAX_PIECES];
        pieces[..self.dealt.pieces.len()].copy_from_slice(&self.dealt.pieces);
        let arrivals: *mut u64 = at(&self.scratch, self.partials).cast();
        let call_number = call_number();
        if !launcher.runs_all_blocks() {
            self.join_alone(&mut pieces[..self.dealt.pieces.len()], arrivals, call_number);
        }
        let shares = ShareGrid {
            partials: at(&self.scratch, 0),
            arrivals,
            call_number,
            whole_rows: self.planned.whole_rows as i32,
            most_pieces: self.dealt.most_pieces as i32,
            pieces,
        };
        Ok(FwdSharesParams { forward, shares })
    }

    /// For a run of a part of the grid: of each block of rows the piece that starts last finds that the others have been there, whether they
    /// have or not, and the others find that more are to come. So joins are timed, as many as there are.
    fn join_alone(&self, pieces: &mut [SharePiece], arrivals: *mut u64, call_number: u64) {
        let mut has_last = vec![false; self.planned.cut_rows as usize];
        for piece in pieces.iter_mut().rev() {
            let (row_block, all) = (usize::from(piece.row_block), piece.pieces());
            if !std::mem::replace(&mut has_last[row_block], true) {
                // SAFETY: a simulator's memory is the host's, and there is a counter for each block of rows that is cut.
                unsafe { arrivals.add(row_block).write(call_number << 16 | (u64::from(all) - 1)) };
            } else {
                piece.part |= 0xff;
            }
        }
    }
}
