//! Says how many parts of a long work are done: at its begin, about every ten seconds, and at its end.
//! Lines, not a bar, so that a pipe and a log have them too.

use std::io::Write;
use std::sync::Mutex;
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_secs(10);

pub struct Progress<W: Write> {
    /// as "kernels"
    parts: String,
    of: usize,
    interval: Duration,
    state: Mutex<State<W>>,
}

struct State<W> {
    done: usize,
    said: Instant,
    out: W,
}

impl<W: Write> Progress<W> {
    /// Begins a work of `of` parts. Says nothing of a work without parts.
    pub fn begin(parts: impl Into<String>, of: usize, out: W) -> Self {
        let progress =
            Progress { parts: parts.into(), of, interval: INTERVAL, state: Mutex::new(State { done: 0, said: Instant::now(), out }) };
        if of > 0 {
            progress.say(&mut progress.state.lock().expect("no thread panics while it says something"));
        }
        progress
    }

    /// Counts one part.
    pub fn advance(&self) {
        let mut state = self.state.lock().expect("no thread panics while it says something");
        state.done += 1;
        if state.done == self.of || state.said.elapsed() >= self.interval {
            self.say(&mut state);
        }
    }

    fn say(&self, state: &mut State<W>) {
        state.said = Instant::now();
        // Begins with a carriage return, because the cursor may be at the end of cargo's bar. A failed write must not fail the build.
        let _ = writeln!(state.out, "\r\x1b[Kvolta_fa: compiled {} of {} {}", state.done, self.of, self.parts);
        let _ = state.out.flush();
    }
}
