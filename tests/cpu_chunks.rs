//! Tests how the CPU backend divides attention into chunks, so that score buffers stay small: each score is in one chunk, no keys outside
//! the window, memory linear in seqlen.
//!
//! A group is one KV head of one batch entry with its query heads. A chunk is a rectangle of scores: `rows` query positions from `row` on
//! by `keys` keys from `key` on, for `groups` groups from `group` on. It has at most CHUNK_SCORES = 2^20 scores, unless it then has fewer
//! than MIN_CHUNK_ROWS = 16 score rows of a group.

use volta_fa::ops::cpu::{chunks, CHUNK_SCORES, MIN_CHUNK_ROWS};
use volta_fa::problem::{Attention, Window};

/// Returns a problem of two batch entries; chunks do not depend on the headdims. A window's bound is None where there is no limit.
fn problem(seqlen_q: i64, seqlen_k: i64, nheads: i64, nheads_k: i64, window: Window) -> Attention {
    Attention { batch: 2, seqlen_q, seqlen_k, nheads, nheads_k, headdim: 64, headdim_v: 64, window, ..Attention::default() }
}

const WINDOWS: [Window; 6] = [
    Window::FULL,
    Window::CAUSAL,
    Window { left: Some(7), right: Some(0) },
    Window { left: Some(0), right: Some(33) },
    Window { left: Some(300), right: None },
    Window { left: Some(i64::MAX), right: Some(i64::MAX) },
];

/// Each pair of a row and a visible key is in exactly one chunk. Row i sees the keys from i + seqlen_k - seqlen_q - left to ... + right.
#[test]
fn chunks_cover_each_score_once() {
    for (sq, sk) in [(1, 1), (1, 500), (500, 1), (130, 300), (300, 130), (257, 257)] {
        // query heads, KV heads
        for (h, hk) in [(1, 1), (6, 2), (300, 1)] {
            for window in WINDOWS {
                let a = problem(sq, sk, h, hk, window);
                let chunks = chunks(&a);
                for group in 0..a.batch * hk {
                    for row in 0..sq {
                        let low = window.left.map_or(0, |w| (row + sk - sq).saturating_sub(w).max(0));
                        let high = window.right.map_or(sk, |w| (row + sk - sq + 1).saturating_add(w).min(sk));
                        let mine: Vec<_> = chunks
                            .iter()
                            .filter(|c| (c.group..c.group + c.groups).contains(&group) && (c.row..c.row + c.rows).contains(&row))
                            .collect();
                        assert!(mine.len() <= 1, "{a:?} row {row}");
                        if low < high {
                            assert_eq!(mine.len(), 1, "{a:?} row {row}");
                            assert!(mine[0].key <= low && high <= mine[0].key + mine[0].keys, "{a:?} row {row}: {mine:?}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn chunk_memory_is_linear_in_seqlen() {
    for seqlen in [1 << 10, 1 << 14, 1 << 18, 1 << 22] {
        for (h, hk) in [(8, 8), (32, 8), (500, 1)] {
            let heads = h / hk; // of a group
            let a = problem(seqlen, seqlen, h, hk, Window::FULL);
            // MIN_CHUNK_ROWS score rows, or those of one query position: one per head of the group
            let most = chunks(&a).iter().map(|c| c.groups * c.rows * heads * c.keys).max().unwrap();
            assert!(most <= CHUNK_SCORES.max(seqlen * MIN_CHUNK_ROWS.max(heads)), "{seqlen} {h} {hk}: {most}");
        }
    }
}

#[test]
fn window_limits_keys_of_chunks() {
    let a = problem(1 << 16, 1 << 16, 1, 1, Window { left: Some(100), right: Some(0) });
    for c in chunks(&a) {
        // the first position sees 101 keys, each further one of the chunk's `rows` one more
        assert!(c.keys <= 100 + c.rows, "{c:?}");
    }
}
