//! Global memory of a launch: bounds-checked buffers shared by all simulated CTAs. A buffer is owned (a job's), memory of the host process
//! mapped at its own address ([`GlobalMem::map`]), or a private copy of either for a timing run ([`GlobalMem::scratch`]).

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Address of the first owned buffer. Owned buffers are aligned to [`GAP`].
const BASE: u64 = 0x2_0000_0000;
/// Minimum bytes between owned buffers (64 KiB): an access there is an error.
const GAP: u64 = 0x1_0000;

pub struct Buffer {
    pub name: String,
    /// device address
    pub base: u64,
    pub len: u64,
    writable: bool,
    /// other CTAs of the launch wrote it a moment before it is read, so a timing run serves reads from L2, not from DRAM
    pub exchanged: bool,
    data: *mut u8,
}

impl Buffer {
    fn end(&self) -> u64 {
        self.base + self.len
    }

    /// Returns whether the buffer has a part of the 32-byte sector at this address.
    pub fn touches(&self, sector: u64) -> bool {
        sector + 32 > self.base && sector < self.end()
    }

    /// Returns a host pointer to [addr, addr+n), or None if the buffer does not hold all of it, or is not writable and `write`.
    #[inline(always)]
    fn at(&self, addr: u64, n: u64, write: bool) -> Option<*mut u8> {
        let o = addr.wrapping_sub(self.base);
        // SAFETY: the offset is inside the buffer.
        (o < self.len && o + n <= self.len && (self.writable || !write)).then(|| unsafe { self.data.add(o as usize) })
    }
}

#[derive(Default)]
pub struct GlobalMem {
    /// in the order of [`GlobalMem::alloc`] and [`GlobalMem::map`]; functions name a buffer by its index
    pub bufs: Vec<Buffer>,
    /// storage of owned buffers and copies
    storage: Vec<Vec<u64>>,
    /// what [`GlobalMem::lock_atomics`] locks
    atomics: Mutex<()>,
}

// SAFETY: buffers are raw device memory: races between CTAs are the kernel's business, as on the GPU.
unsafe impl Sync for GlobalMem {}
unsafe impl Send for GlobalMem {}

impl GlobalMem {
    /// Returns zeroed room for `bytes`, 8-byte-aligned, owned by this memory.
    fn reserve(&mut self, bytes: u64) -> *mut u8 {
        self.storage.push(vec![0u64; bytes as usize / 8 + 1]);
        self.storage.last_mut().expect("just pushed").as_mut_ptr() as *mut u8
    }

    /// Add an owned buffer above all others and return its device address.
    pub fn alloc(&mut self, name: &str, init: &[u8], writable: bool) -> u64 {
        let base = self.bufs.iter().map(Buffer::end).max().map_or(BASE, |end| (end + GAP).next_multiple_of(GAP));
        let data = self.reserve(init.len() as u64);
        // SAFETY: `data` was reserved with this length.
        unsafe { std::ptr::copy_nonoverlapping(init.as_ptr(), data, init.len()) };
        self.bufs.push(Buffer { name: name.into(), base, len: init.len() as u64, writable, exchanged: false, data });
        base
    }

    /// Map host memory at its own address. Empty and null extents are ignored.
    ///
    /// # Safety
    /// `len` bytes at `data` stay readable (and writable, if `writable`) while this memory is used.
    pub unsafe fn map(&mut self, name: &str, data: *mut u8, len: usize, writable: bool, exchanged: bool) -> Result<(), String> {
        if data.is_null() || len == 0 {
            return Ok(());
        }
        let base = data as u64;
        if base.checked_add(len as u64).is_none_or(|end| end > 1 << 62) {
            return Err(format!("extent `{name}`: {len} bytes at {base:#x} do not fit the address space"));
        }
        self.bufs.push(Buffer { name: name.into(), base, len: len as u64, writable, exchanged, data });
        Ok(())
    }

    /// The same address map with private copies of everything a kernel can write.
    pub fn scratch(&self) -> GlobalMem {
        let mut copy = GlobalMem::default();
        for b in &self.bufs {
            copy.bufs.push(Buffer { name: b.name.clone(), ..*b });
        }
        // overlapping buffers share one copy
        let mut order: Vec<usize> = (0..self.bufs.len()).collect();
        order.sort_by_key(|&i| self.bufs[i].base);
        let mut i = 0;
        while i < order.len() {
            let start = self.bufs[order[i]].base;
            let (mut end, mut j) = (start, i);
            while j < order.len() && (j == i || self.bufs[order[j]].base < end) {
                end = end.max(self.bufs[order[j]].end());
                j += 1;
            }
            if order[i..j].iter().any(|&k| self.bufs[k].writable) {
                let data = copy.reserve(end - start);
                for &k in &order[i..j] {
                    let b = &mut copy.bufs[k];
                    // SAFETY: [start, end) contains the buffer.
                    b.data = unsafe { data.add((b.base - start) as usize) };
                }
            }
            i = j;
        }
        copy.restore(self);
        copy
    }

    /// Give the copies of a [`GlobalMem::scratch`] the content of their original again.
    pub fn restore(&mut self, original: &GlobalMem) {
        for (to, from) in self.bufs.iter().zip(&original.bufs) {
            if to.data != from.data {
                // SAFETY: both hold `len` bytes; the copy is storage of its own.
                unsafe { std::ptr::copy_nonoverlapping(from.data, to.data, from.len as usize) };
            }
        }
    }

    /// Returns the content of buffer number `idx`.
    pub fn bytes(&self, idx: usize) -> &[u8] {
        let b = &self.bufs[idx];
        // SAFETY: the buffer's memory is alive, and nothing writes it while no kernel runs.
        unsafe { std::slice::from_raw_parts(b.data, b.len as usize) }
    }

    /// Serializes atomics of CTAs that run on several host threads. Plain loads and stores need no lock.
    pub fn lock_atomics(&self) -> MutexGuard<'_, ()> {
        self.atomics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a host pointer to [addr, addr+n) for loads, or with `write` for stores; None if no buffer (with
    /// `write`: no writable one) holds all of it. `hint`: index of the buffer found last, where the search begins.
    #[inline(always)]
    pub fn find(&self, addr: u64, n: u64, write: bool, hint: &mut usize) -> Option<*mut u8> {
        self.bufs.get(*hint).and_then(|b| b.at(addr, n, write)).or_else(|| self.find_slow(addr, n, write, hint))
    }

    #[cold]
    fn find_slow(&self, addr: u64, n: u64, write: bool, hint: &mut usize) -> Option<*mut u8> {
        let (i, p) = self.bufs.iter().enumerate().find_map(|(i, b)| Some((i, b.at(addr, n, write)?)))?;
        *hint = i;
        Some(p)
    }

    /// Returns text for a fault's error: the nearest buffer, and where the address is relative to it.
    pub fn describe(&self, addr: u64) -> String {
        let distance = |b: &Buffer| if addr < b.base { b.base - addr } else { addr.saturating_sub(b.end()) };
        let Some(b) = self.bufs.iter().min_by_key(|b| distance(b)) else { return "no buffers".into() };
        let at = if addr < b.base { format!("{} bytes before it", b.base - addr) } else { format!("at its byte {}", addr - b.base) };
        let access = if b.writable { "" } else { ", read-only" };
        format!("nearest buffer `{}` [{:#x}, +{} bytes{access}]: address is {at}", b.name, b.base, b.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_keeps_overlaps_and_read_only_memory() {
        let mut host: Vec<u8> = (0..64).collect();
        let p = host.as_mut_ptr();
        let mut mem = GlobalMem::default();
        // name, pointer, bytes, writable, exchanged
        unsafe {
            mem.map("null", std::ptr::null_mut(), 8, true, false).unwrap();
            mem.map("empty", p, 0, true, false).unwrap();
            mem.map("a", p, 24, true, false).unwrap();
            mem.map("b", p.add(16), 16, true, false).unwrap();
            mem.map("c", p.add(32), 32, false, false).unwrap();
        }
        assert_eq!(mem.bufs.len(), 3);
        let mut copy = mem.scratch();
        unsafe { *copy.find(p as u64 + 20, 1, true, &mut 0).unwrap() = 99 };
        assert_eq!((copy.bytes(0)[20], copy.bytes(1)[4], mem.bytes(0)[20]), (99, 99, 20));
        assert_eq!(copy.bytes(2).as_ptr(), mem.bytes(2).as_ptr());
        assert!(copy.find(p as u64 + 40, 1, true, &mut 2).is_none());
        assert!(copy.find(p as u64 + 63, 2, false, &mut 2).is_none());
        copy.restore(&mem);
        assert_eq!((copy.bytes(0)[20], copy.bytes(1)[4]), (20, 20));
        assert!(mem.alloc("owned", &[1, 2], true) > p as u64 + 64);
    }
}
