//! Drivers: the functional run of a whole grid, and the timing run of one SM's share of it.

use crate::cta::Cta;
use crate::env::Env;
use crate::machine::Machine;
use crate::step::{Access, SimResult};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::OnceLock;

pub fn cta_id(grid: &[u32; 3], linear: u32) -> [u32; 3] {
    [linear % grid[0], linear / grid[0] % grid[1], linear / grid[0] / grid[1]]
}

/// Run one CTA to completion, functionally. Returns the warp instructions executed.
pub fn run_cta(env: &Env, id: [u32; 3], quantum: u32, acc: &mut Access) -> SimResult<u64> {
    let mut cta = Cta::new(env, id);
    let mut insts = 0u64;
    while !cta.done() {
        let mut progress = false;
        for wi in 0..cta.warps.len() {
            let mut left = quantum;
            while left > 0 && cta.warps[wi].select().is_some() {
                cta.step(wi, env, insts, acc)?;
                insts += 1;
                left -= 1;
                progress = true;
            }
        }
        if !progress {
            return Err(format!("kernel `{}`: CTA {:?} deadlocked:{}", env.prog.name, id, cta.stuck()));
        }
    }
    Ok(insts)
}

/// Run every CTA of the grid on `threads` host threads. Returns the warp instructions executed.
pub fn functional(env: &Env, threads: usize, quantum: u32) -> SimResult<u64> {
    let total: u32 = env.grid.iter().product();
    let next = AtomicU32::new(0);
    let insts = AtomicU64::new(0);
    let error: OnceLock<String> = OnceLock::new();
    let worker = || {
        let mut acc = Access::default();
        while error.get().is_none() {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= total {
                return;
            }
            match run_cta(env, cta_id(&env.grid, i), quantum, &mut acc) {
                Ok(n) => drop(insts.fetch_add(n, Ordering::Relaxed)),
                Err(e) => drop(error.set(e)),
            }
        }
    };
    std::thread::scope(|s| {
        for _ in 1..threads.min(total as usize) {
            s.spawn(worker);
        }
        worker();
    });
    match error.into_inner() {
        Some(e) => Err(e),
        None => Ok(insts.into_inner()),
    }
}

/// CTAs of one SM in dispatch order, with the estimated cost of each.
pub struct Share {
    pub sm: u32,
    pub list: Vec<[u32; 3]>,
    pub cost: Vec<u64>,
    /// estimated finish of the average SM relative to the chosen one
    pub balance: f64,
    pub note: String,
}

/// Round-robin dispatch: of 80 SMs, SM s gets CTAs s, s+80, ...
pub fn static_share(env: &Env, m: &Machine, sm: u32) -> Share {
    let total: u32 = env.grid.iter().product();
    let list: Vec<_> = (sm..total).step_by(m.sms as usize).map(|i| cta_id(&env.grid, i)).collect();
    let cost = vec![1; list.len()];
    Share { sm, list, cost, balance: 1.0, note: "static round-robin".into() }
}

/// Dynamic dispatch: CTA costs (warp instructions) are measured functionally on one CTA per class,
/// a list scheduler hands CTAs in order to the first free slot, and the SM that finishes last is taken.
/// The caller restores memory afterwards.
pub fn dynamic_share(env: &Env, m: &Machine, slots: u32, sm: Option<u32>) -> SimResult<Share> {
    let total: u32 = env.grid.iter().product();
    let mut acc = Access::default();
    let base = run_cta(env, [0, 0, 0], 32, &mut acc)? as f64;
    // which axes change the work of a CTA?
    let mut varying = [false; 3];
    for ax in 0..3 {
        let n = env.grid[ax];
        for c in [n / 2, n - 1] {
            if n > 1 && !varying[ax] {
                let mut id = [0; 3];
                id[ax] = c;
                varying[ax] = (run_cta(env, id, 32, &mut acc)? as f64 / base - 1.0).abs() > 0.02;
            }
        }
    }
    // sample at most ~24 coordinates of each varying axis
    let key = |id: [u32; 3]| -> [u32; 3] {
        std::array::from_fn(|ax| {
            if !varying[ax] {
                return 0;
            }
            let n = env.grid[ax];
            let step = n.div_ceil(24);
            (id[ax] / step * step + step / 2).min(n - 1)
        })
    };
    let mut memo = std::collections::HashMap::new();
    let mut cost = vec![0u64; total as usize];
    for i in 0..total {
        let k = key(cta_id(&env.grid, i));
        cost[i as usize] = match memo.get(&k) {
            Some(&c) => c,
            None => {
                let c = run_cta(env, k, 32, &mut acc)?;
                memo.insert(k, c);
                c
            }
        };
    }
    // list scheduling, breadth-first over the SMs
    let mut per_sm: Vec<Vec<u32>> = vec![vec![]; m.sms as usize];
    let mut finish = vec![0u64; m.sms as usize];
    let mut heap = BinaryHeap::new();
    for slot in 0..slots {
        for s in 0..m.sms {
            heap.push(Reverse((0u64, slot, s)));
        }
    }
    for i in 0..total {
        let Reverse((t, slot, s)) = heap.pop().unwrap();
        per_sm[s as usize].push(i);
        let e = t + cost[i as usize];
        finish[s as usize] = finish[s as usize].max(e);
        heap.push(Reverse((e, slot, s)));
    }
    // slots of an SM share its pipes: total work decides, finish time breaks ties
    let load = |s: usize| per_sm[s].iter().map(|&i| cost[i as usize]).sum::<u64>();
    let chosen = sm.unwrap_or_else(|| (0..m.sms).max_by_key(|&s| (load(s as usize), finish[s as usize], Reverse(s))).unwrap());
    let avg = (0..m.sms as usize).map(load).sum::<u64>() as f64 / m.sms as f64;
    let c = chosen as usize;
    Ok(Share {
        sm: chosen,
        list: per_sm[c].iter().map(|&i| cta_id(&env.grid, i)).collect(),
        cost: per_sm[c].iter().map(|&i| cost[i as usize]).collect(),
        balance: avg / load(c).max(1) as f64,
        note: format!(
            "dynamic; CTA work varies along {:?}",
            (0..3).filter(|&a| varying[a]).map(|a| ["x", "y", "z"][a]).collect::<Vec<_>>()
        ),
    })
}
