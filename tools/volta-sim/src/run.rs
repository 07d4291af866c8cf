//! Runs a whole grid functionally, and finds the CTAs (thread blocks) that one SM gets, whose cycles `timing` then simulates. The cost of a
//! CTA is the number of warp instructions that it executes. A slot is room for a resident CTA on an SM.

use crate::cta::Cta;
use crate::env::Env;
use crate::machine::Machine;
use crate::step::{Access, SimResult};
use std::cmp::Reverse;
use std::collections::hash_map::{Entry, HashMap};
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::OnceLock;

/// CTAs count as equal if their costs differ by at most one part in this many.
const SAME_COST: u64 = 50;
/// Instructions that a warp executes before the next one runs, where a CTA runs only to measure its cost.
const QUANTUM: u32 = 32;

/// Returns the index of CTA number `linear` in grid order: x first.
pub fn cta_id(grid: &[u32; 3], linear: u32) -> [u32; 3] {
    [linear % grid[0], linear / grid[0] % grid[1], linear / grid[0] / grid[1]]
}

/// Run one CTA to completion, functionally: each warp in turn for up to `quantum` instructions. Returns the warp instructions executed.
/// `acc`: what instructions record for the timing model, unused here.
pub fn run_cta(env: &Env, id: [u32; 3], quantum: u32, acc: &mut Access) -> SimResult<u64> {
    let mut cta = Cta::new(env, id);
    let mut insts = 0u64; // also what the clock registers read
    while !cta.done() {
        let mut progress = false;
        for warp_index in 0..cta.warps.len() {
            let mut left = quantum;
            while left > 0 && cta.warps[warp_index].select().is_some() {
                cta.step(warp_index, env, insts, acc)?;
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

/// The CTAs that one SM gets, in dispatch order.
pub struct Share {
    pub sm: u32,
    pub ctas: Vec<[u32; 3]>,
    /// estimated cost of each: warp instructions, or 1 with static dispatch
    pub cost: Vec<u64>,
    /// cost of the average SM's CTAs relative to this one's
    pub balance: f64,
    /// SMs that have at least a third of this one's cost; with static dispatch, SMs that have CTAs. The bandwidth of L2 and DRAM is theirs
    pub busy_sms: u32,
    /// how the CTAs were dispatched, for the report
    pub note: String,
}

/// Round-robin dispatch: of 80 SMs, SM s gets CTAs s, s+80, ...
pub fn static_share(env: &Env, m: &Machine, sm: u32) -> Share {
    let total: u32 = env.grid.iter().product();
    let ctas: Vec<_> = (sm..total).step_by(m.sms as usize).map(|i| cta_id(&env.grid, i)).collect();
    let cost = vec![1; ctas.len()];
    Share { sm, ctas, cost, balance: 1.0, busy_sms: m.sms.min(total), note: "static round-robin".into() }
}

/// Returns the CTAs that each SM gets, and when it ends, if a CTA takes `cost` wherever it runs. In grid order, each CTA gets the first
/// free slot. An SM has `slots` of them.
///
/// The first CTAs go one to each SM, then a second one to each, as every SM has room. Slots that free at the same time are taken SM by SM:
/// CTAs that start together on an SM end within 10 cycles of each other (seen in this simulator). On different SMs the same work differs by
/// more than that: the latency of L2 alone does (Jia18, a source of `machine`). So the next free slot is most often on the same SM.
fn deal(cost: &[u64], sms: usize, slots: usize) -> (Vec<Vec<u32>>, Vec<u64>) {
    let mut per_sm: Vec<Vec<u32>> = vec![vec![]; sms];
    let mut finish = vec![0u64; sms];
    let mut heap = BinaryHeap::new();
    for (i, &cost) in cost.iter().enumerate() {
        // a slot: the cycle from which it is free, here the sum of costs before, and its SM
        let (start, sm) = if i < sms * slots {
            (0, i % sms)
        } else {
            let Reverse(slot) = heap.pop().expect("the first `sms * slots` CTAs");
            slot
        };
        per_sm[sm].push(i as u32);
        finish[sm] = finish[sm].max(start + cost);
        heap.push(Reverse((start + cost, sm)));
    }
    (per_sm, finish)
}

/// Returns for each of `n` coordinates of a grid axis one whose CTA costs as much. `cost` returns the cost of a coordinate's CTA. Samples
/// about 24 coordinates, and bisects between two neighbors that differ by more than [`SAME_COST`] allows, so that runs of CTAs of several
/// kinds are told apart.
fn representatives(n: u32, cost: &mut impl FnMut(u32) -> SimResult<u64>) -> SimResult<Vec<u32>> {
    let step = n.div_ceil(24);
    let mut like: Vec<u32> = (0..n).map(|c| (c / step * step + step / 2).min(n - 1)).collect();
    if step <= 2 {
        return Ok(like);
    }
    let known: Vec<u32> = (0..n).filter(|&c| like[c as usize] == c || c == 0 || c == n - 1).collect();
    let costs = known.iter().map(|&c| cost(c)).collect::<SimResult<Vec<_>>>()?;
    let ends: Vec<_> = known.into_iter().zip(costs).collect();
    let mut todo: Vec<_> = ends.windows(2).map(|pair| (pair[0], pair[1])).collect();
    let differ = |a: u64, b: u64| a.abs_diff(b) * SAME_COST > a.max(b);
    for &(c, _) in &ends {
        like[c as usize] = c;
    }
    while let Some((first, last)) = todo.pop() {
        let middle = first.0.midpoint(last.0);
        if !differ(first.1, last.1) {
            // between two samples that are alike: the nearer one
            (first.0 + 1..last.0).for_each(|c| like[c as usize] = if c < middle { first.0 } else { last.0 });
        } else if middle > first.0 {
            let found = (middle, cost(middle)?);
            like[middle as usize] = middle;
            todo.extend([(first, found), (found, last)]);
        }
    }
    Ok(like)
}

/// Dynamic dispatch: runs one CTA of each kind functionally for its cost in warp instructions, hands CTAs out with [`deal`],
/// and takes the SM with the highest cost, or `sm`. These runs write memory, which the caller restores.
pub fn dynamic_share(env: &Env, m: &Machine, slots: u32, sm: Option<u32>) -> SimResult<Share> {
    let total: u32 = env.grid.iter().product();
    let mut acc = Access::default();
    let base = run_cta(env, [0, 0, 0], QUANTUM, &mut acc)? as f64;
    // cost of the CTA with index `c` along axis `ax`, and 0 along the others
    let mut cost_at = |ax: usize, c: u32| {
        let mut id = [0; 3];
        id[ax] = c;
        run_cta(env, id, QUANTUM, &mut acc)
    };
    // the axes along which the cost of a CTA differs
    let mut varying = [false; 3];
    for ax in 0..3 {
        let n = env.grid[ax];
        for c in [n / 2, n - 1] {
            if n > 1 && !varying[ax] {
                varying[ax] = (cost_at(ax, c)? as f64 / base - 1.0).abs() > 1.0 / SAME_COST as f64;
            }
        }
    }
    // by axis and index, an index with the same cost
    let mut like = [vec![], vec![], vec![]];
    for (ax, like) in like.iter_mut().enumerate() {
        let n = env.grid[ax];
        *like = if varying[ax] { representatives(n, &mut |c| cost_at(ax, c))? } else { vec![0; n as usize] };
    }
    let key = |id: [u32; 3]| -> [u32; 3] { std::array::from_fn(|ax| like[ax][id[ax] as usize]) };
    let mut memo = HashMap::new(); // costs of the CTAs that have run
    let mut cost = vec![];
    for i in 0..total {
        let alike = key(cta_id(&env.grid, i));
        cost.push(match memo.entry(alike) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(unknown) => *unknown.insert(run_cta(env, alike, QUANTUM, &mut acc)?),
        });
    }
    let (per_sm, finish) = deal(&cost, m.sms as usize, slots as usize);
    // slots of an SM share its pipes: the total cost decides, the finish time breaks ties
    let load = |s: usize| per_sm[s].iter().map(|&i| cost[i as usize]).sum::<u64>();
    let chosen = sm.unwrap_or_else(|| (0..m.sms).max_by_key(|&s| (load(s as usize), finish[s as usize], Reverse(s))).unwrap());
    let avg = (0..m.sms as usize).map(load).sum::<u64>() as f64 / m.sms as f64;
    let c = chosen as usize;
    let axes: Vec<_> = (0..3).filter(|&a| varying[a]).map(|a| ["x", "y", "z"][a]).collect();
    Ok(Share {
        sm: chosen,
        ctas: per_sm[c].iter().map(|&i| cta_id(&env.grid, i)).collect(),
        cost: per_sm[c].iter().map(|&i| cost[i as usize]).collect(),
        balance: avg / load(c).max(1) as f64,
        busy_sms: (0..m.sms as usize).filter(|&s| 3 * load(s) >= load(c)).count() as u32,
        note: format!("dynamic; CTA work varies along {axes:?}"),
    })
}

#[cfg(test)]
mod tests {
    use super::{deal, representatives};

    #[test]
    fn representatives_find_runs_of_several_kinds_of_ctas() {
        let work = |c: u32| if c < 80 || (161..900).contains(&c) { 1000 } else { 300 };
        let mut asked = 0;
        let like = representatives(1000, &mut |c| {
            asked += 1;
            Ok(work(c))
        })
        .unwrap();
        assert!((0..1000).all(|c| work(like[c as usize]) == work(c)));
        assert!(asked < 80, "{asked}");
    }

    #[test]
    fn the_first_ctas_go_one_to_each_sm() {
        assert_eq!(deal(&[5; 4], 3, 2).0, [vec![0, 3], vec![1], vec![2]]);
    }
    #[test]
    fn slots_that_free_together_are_taken_together() {
        let (per_sm, finish) = deal(&[5; 9], 3, 2);
        assert_eq!(per_sm, [vec![0, 3, 6, 7], vec![1, 4, 8], vec![2, 5]]);
        assert_eq!(finish, [10, 10, 5]);
    }
    #[test]
    fn the_first_free_slot_is_taken() {
        // SM 1 has the short ones
        assert_eq!(deal(&[9, 2, 9, 3, 1, 1], 2, 2).0, [vec![0, 2], vec![1, 3, 4, 5]]);
    }
}
