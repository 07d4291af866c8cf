//! The state of one CTA: its warps, shared memory and named barriers.

use crate::env::Env;
use crate::isa::BarMode;
use crate::warp::{GState, Warp};

#[derive(Default, Clone)]
pub struct CtaBar {
    pub arrived: u32,
    pub expect: u32,
    pub waiting: Vec<usize>,
    pub popc: u32,
    pub and: bool,
    pub or: bool,
}

pub struct Cta {
    pub id: [u32; 3],
    pub shared: Vec<u8>,
    pub warps: Vec<Warp>,
    pub bars: Vec<CtaBar>,
    pub live_warps: u32,
    /// warps released by a barrier since the caller last cleared the list
    pub released: Vec<usize>,
}

impl Cta {
    pub fn new(env: &Env, id: [u32; 3]) -> Self {
        let threads = env.block.iter().product::<u32>();
        let nw = threads.div_ceil(32);
        let warps = (0..nw)
            .map(|i| {
                let n = (threads - i * 32).min(32);
                Warp::new(i, env.prog.reg_file, if n == 32 { !0 } else { (1 << n) - 1 })
            })
            .collect();
        Cta { id, shared: vec![0xff; env.smem_bytes as usize], warps, bars: vec![CtaBar::default(); 16], live_warps: nw, released: vec![] }
    }
    pub fn done(&self) -> bool {
        self.live_warps == 0
    }

    pub fn bar_release(&mut self, id: usize, mode: Option<BarMode>) {
        let b = std::mem::take(&mut self.bars[id]);
        let val = match mode {
            Some(BarMode::RedPopc) => b.popc,
            Some(BarMode::RedAnd) => (b.and as u32).wrapping_neg(),
            Some(BarMode::RedOr) => (b.or as u32).wrapping_neg(),
            _ => 0,
        };
        for wi in b.waiting {
            let w = &mut self.warps[wi];
            w.bar_result = val;
            for g in w.groups.iter_mut() {
                if g.st == GState::Bar(id as u8) {
                    g.st = GState::Run;
                }
            }
            w.cur = 0;
            w.merge_current();
            self.released.push(wi);
        }
    }

    pub fn warp_exited(&mut self) {
        self.live_warps -= 1;
        for id in 0..16 {
            let b = &self.bars[id];
            if b.arrived > 0 && b.expect == 0 && b.arrived >= self.live_warps {
                // a reduction barrier finished by an exit keeps the OR/POPC of those that arrived
                self.bar_release(id, None);
            }
        }
    }

    /// Deadlock description: where every live warp waits.
    pub fn stuck(&self) -> String {
        let mut s = String::new();
        for (i, w) in self.warps.iter().enumerate() {
            for g in &w.groups {
                s += &format!(" warp {i}: pc 0x{:x} mask {:#x} {:?};", g.pc, g.mask, g.st);
            }
        }
        s
    }
}
