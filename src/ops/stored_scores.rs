//! Memory of P and dS between the kernels of a backward pass for large headdims.

use super::blocks::at;
use crate::error::Result;
use crate::launch::Launcher;
use crate::params::StoredScores;
use crate::plan::{StoredPlan, STORED_ROWS};
use crate::problem::Attention;
use crate::tensor;
use tch::{Kind, Tensor};

/// Memory of one launch's tiles. All launches use it, one after the other.
pub struct StoredMemory {
    plan: StoredPlan,
    p: Tensor,
    ds: Tensor,
    dq_sums: Tensor,
}

impl StoredMemory {
    /// Allocates memory for launches of `entries` batch entries (1 if packed).
    pub fn new(plan: StoredPlan, a: &Attention, entries: i64, launcher: &dyn Launcher) -> Result<StoredMemory> {
        let heads = plan.heads * (a.nheads / a.nheads_k);
        // p and ds have a tile for each key tile, dq_sums one for each column tile of dq. With `split` a tile of p or ds has high parts,
        // low parts and a row of units.
        let tile = |tiles, rows, kind| {
            let sizes = [entries, heads, plan.query_tiles, tiles, rows, STORED_ROWS];
            tensor::empty(&sizes, kind, launcher)
        };
        let sum_tiles = if plan.key_launches > 1 { plan.columns } else { 0 };
        let scores = || tile(plan.key_tiles, plan.tile_rows(), Kind::Half);
        Ok(StoredMemory { plan, p: scores()?, ds: scores()?, dq_sums: tile(sum_tiles, STORED_ROWS, Kind::Float)? })
    }

    /// Returns the tensors by name.
    pub fn tensors(&self) -> [(&'static str, &Tensor); 3] {
        [("p", &self.p), ("ds", &self.ds), ("dq_sums", &self.dq_sums)]
    }

    /// Returns the parameters of each launch, in order.
    pub fn launches(&self, nheads_k: i64) -> impl Iterator<Item = StoredScores> + '_ {
        let plan = self.plan;
        plan.launches(nheads_k).map(move |(first_head, first_key_tile)| StoredScores {
            p: self.p.data_ptr() as *mut u16,
            ds: self.ds.data_ptr() as *mut u16,
            dq_sums: at(&self.dq_sums, 0),
            query_tiles: plan.query_tiles as i32,
            key_tiles: plan.key_tiles as i32,
            first_key_tile: first_key_tile as i32,
            heads: plan.heads as i32,
            first_head: first_head as i32,
            is_first: (first_key_tile == 0) as i32,
            is_last: (first_key_tile == (plan.key_launches - 1) * plan.key_tiles) as i32,
        })
    }
}
