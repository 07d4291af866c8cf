//! Tags of the timing model's caches: the lines that they hold, without their content.

/// L1 or L2: set-associative, lines of 128 bytes with 4 sectors of 32 bytes that are filled one by one. Replaces the line unused longest.
pub(super) struct Cache {
    sets: Vec<Vec<Line>>,
    /// maximum lines of a set
    ways: usize,
    /// number of accesses, the time of `Line::used`
    tick: u64,
}
struct Line {
    /// byte address / 128
    tag: u64,
    /// sectors that are filled, a bit each
    sectors: u8,
    used: u64,
}
impl Cache {
    pub(super) fn new(bytes: u64, ways: usize) -> Self {
        let n = (bytes / 128 / ways as u64).max(1) as usize;
        Cache { sets: (0..n).map(|_| Vec::new()).collect(), ways, tick: 0 }
    }
    /// Looks up the sector of a byte address. Returns true on a hit; a miss fills the sector.
    pub(super) fn access(&mut self, addr: u64) -> bool {
        self.tick += 1;
        let (tag, sector) = (addr / 128, 1u8 << (addr / 32 % 4));
        let n = self.sets.len() as u64;
        // the set: a hash of the line's number
        let set = &mut self.sets[((tag ^ (tag >> 7)) % n) as usize];
        if let Some(l) = set.iter_mut().find(|l| l.tag == tag) {
            l.used = self.tick;
            let hit = l.sectors & sector != 0;
            l.sectors |= sector;
            return hit;
        }
        let line = Line { tag, sectors: sector, used: self.tick };
        if set.len() < self.ways {
            set.push(line);
        } else {
            *set.iter_mut().min_by_key(|l| l.used).unwrap() = line;
        }
        false
    }
}

/// An instruction cache, the L0 of one sub-partition or the L1.5 they share. A line is 128 bytes of the kernel's code, 8 instructions.
#[derive(Default)]
pub(super) struct ICache {
    /// by line: the cycle from which it is here, or [`ABSENT`]
    pub(super) ready: Vec<u64>,
    /// by line: the cycle of its last use
    pub(super) used: Vec<u64>,
    /// the lines that are here or in flight
    held: Vec<u32>,
    /// state of the pseudo-random choice of a victim, not 0
    seed: u64,
}
pub(super) const ABSENT: u64 = u64::MAX;

impl ICache {
    pub(super) fn new(lines: usize, seed: u64) -> Self {
        ICache { ready: vec![ABSENT; lines], used: vec![0; lines], held: vec![], seed }
    }

    /// Adds an absent line at cycle `now`, which will be here at cycle `ready`. If `capacity` lines are held, it replaces the one unused
    /// longest, or with `random` any but `keep`, the line that a warp waits for.
    pub(super) fn fill(&mut self, line: u32, keep: u32, capacity: usize, random: bool, now: u64, ready: u64) {
        if self.held.len() >= capacity {
            let i = if random {
                // xorshift64*: the same victims in each run
                self.seed ^= self.seed >> 12;
                self.seed ^= self.seed << 25;
                self.seed ^= self.seed >> 27;
                let i = (self.seed.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as usize % self.held.len();
                (i + usize::from(self.held[i] == keep)) % self.held.len()
            } else {
                self.held.iter().enumerate().min_by_key(|(_, &h)| self.used[h as usize]).unwrap().0
            };
            let old = self.held.swap_remove(i);
            self.ready[old as usize] = ABSENT;
        }
        self.ready[line as usize] = ready;
        self.used[line as usize] = now;
        self.held.push(line);
    }
}
