//! Launches of grids of equal shares: their scratch memory, and who has what.

use super::blocks::at;
use super::launches::launch_id;
use crate::error::Result;
use crate::launch::Launcher;
use crate::limits::MAX_STREAM_K_SPLITS;
use crate::params::{FwdParams, FwdStreamKParams, StreamKParams, StreamKSplit};
use crate::plan::{PlannedKernel, StreamKPlan, StreamKSchedule};
use crate::tensor;
use std::cell::RefCell;
use std::rc::Rc;
use tch::{Device, Kind, Tensor};

/// What a launch has beside the parameters of the usual grids.
pub struct Launch {
    dealt: Rc<StreamKSchedule>,
    planned: StreamKPlan,
    /// the results of pieces, and behind them who has arrived
    scratch: Tensor,
    partials: i64,
}

/// Who has what: a thread remembers the last answer, since a model's layers all ask the same.
fn dealt(shares: StreamKPlan) -> Rc<StreamKSchedule> {
    thread_local!(static LAST: RefCell<Option<(StreamKPlan, Rc<StreamKSchedule>)>> = const { RefCell::new(None) });
    LAST.with_borrow_mut(|last| match last {
        Some((same, dealt)) if *same == shares => dealt.clone(),
        _ => last.insert((shares, Rc::new(shares.deal()))).1.clone(),
    })
}

impl Launch {
    pub fn new(kernel: &PlannedKernel, planned: StreamKPlan, device: Device, launcher: &dyn Launcher) -> Result<Launch> {
        let dealt = dealt(planned);
        // of a row: its output in fp32, and 8 lanes' references and sums, or 16 lanes' of half the columns (`put_result` in layout.cuh)
        let floats = i64::from(kernel.variant.block_rows) * (i64::from(kernel.variant.headdim_v) + 8);
        let partials = i64::from(planned.stream_k_tiles) * i64::from(dealt.most_pieces) * floats;
        let scratch = tensor::empty(&[partials + 2 * i64::from(planned.stream_k_tiles)], Kind::Float, device, launcher.output_alignment())?;
        Ok(Launch { dealt, planned, scratch, partials })
    }

    /// Returns the scratch memory.
    pub fn scratch(&self) -> &Tensor {
        &self.scratch
    }

    /// The parameter block.
    pub fn params(&self, forward: FwdParams, launcher: &dyn Launcher) -> Result<FwdStreamKParams> {
        let mut pieces = [StreamKSplit::default(); MAX_STREAM_K_SPLITS];
        pieces[..self.dealt.pieces.len()].copy_from_slice(&self.dealt.pieces);
        let semaphores: *mut u64 = at(&self.scratch, self.partials).cast();
        let launch_id = launch_id();
        if !launcher.runs_all_blocks() {
            self.join_alone(&mut pieces[..self.dealt.pieces.len()], semaphores, launch_id);
        }
        let shares = StreamKParams {
            partials: at(&self.scratch, 0),
            semaphores,
            launch_id,
            data_parallel_tiles: self.planned.data_parallel_tiles as i32,
            most_pieces: self.dealt.most_pieces as i32,
            pieces,
        };
        Ok(FwdStreamKParams { forward, shares })
    }

    /// For a run of a part of the grid: of each block of rows the piece that starts last finds that the others have been there, whether they
    /// have or not, and the others find that more are to come. So joins are timed, as many as there are.
    fn join_alone(&self, pieces: &mut [StreamKSplit], semaphores: *mut u64, launch_id: u64) {
        let mut has_last = vec![false; self.planned.stream_k_tiles as usize];
        for piece in pieces.iter_mut().rev() {
            let (row_block, all) = (usize::from(piece.row_block), piece.pieces());
            if !std::mem::replace(&mut has_last[row_block], true) {
                // SAFETY: a simulator's memory is the host's, and there is a counter for each block of rows that is cut.
                unsafe { semaphores.add(row_block).write(launch_id << 16 | (u64::from(all) - 1)) };
            } else {
                piece.part |= 0xff;
            }
        }
    }
}
